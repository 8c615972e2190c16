"""Tuning: which drafter and draft length pay on a machine and a user's prompts, predicted first and then measured."""
