"""Prompt sets for measurements and training: how their files are read."""

from paceline.moved import names_of

__getattr__ = names_of("paceline.prompts", "paceline.prompts.files")
