"""Acceptance rules: what verification does with a draft."""
