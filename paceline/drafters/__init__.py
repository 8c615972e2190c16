"""Drafters: whatever guesses the next tokens. One protocol, mixed in one batch, chosen per request."""
