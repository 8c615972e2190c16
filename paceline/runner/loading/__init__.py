"""Loading of models and heads: from their files to something that runs on this machine, within its memory."""
