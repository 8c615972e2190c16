"""Plans: what a model needs and how fast it is on GPUs that one does not have yet, and a simulated cluster of them."""
