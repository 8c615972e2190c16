"""The runner computes logits and tokens: batches, forwards and heads that run them, rounds on a device, loading."""
