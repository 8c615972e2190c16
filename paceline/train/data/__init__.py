"""Training data: prompts, the target's answers to them, and the target's hidden states over both."""
