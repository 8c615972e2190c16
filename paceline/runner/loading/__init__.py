"""Loading: from a model's or a head's files to something that runs on this machine, within its memory."""
