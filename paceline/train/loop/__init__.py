"""The training loop: batches, gradients, scores, checkpoints, several processes."""
