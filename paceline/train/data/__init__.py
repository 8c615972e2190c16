"""What a drafter is trained on: prompts, the target's answers, and what the target computes of them."""
