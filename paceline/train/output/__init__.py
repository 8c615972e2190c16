"""Pages about a finished training: the model card and its curves."""
