"""Drafters that learn: one file a kind, with their initial weights, and the teacher they learn from."""
