"""From a plan to logits and tokens: batches, forwards and heads that run them, rounds on a device, and loading."""
