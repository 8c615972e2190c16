"""The training loop: gradients, learning rate, scores, checkpoints, several processes."""
