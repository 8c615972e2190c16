"""The EAGLE-3 drafter: reading the target's hidden states, and drafting from them."""
