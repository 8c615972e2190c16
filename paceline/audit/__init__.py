"""Replays prompts plain and speculative, and judges every difference: see docs/audit.md."""
