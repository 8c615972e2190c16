"""From a plan to logits: batches, and the forwards that run them."""
