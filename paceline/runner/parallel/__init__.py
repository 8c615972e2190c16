"""Tensor parallelism: one model split over several processes, of which rank 0 has the engine and the others compute."""
