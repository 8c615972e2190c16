"""The command line: one small file a command, nothing that a Python user could not do with `paceline.LLM`."""
