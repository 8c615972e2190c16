"""Loading of models and heads from files, into forwards that run on this machine and fit into its memory."""
