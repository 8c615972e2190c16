"""Models: from files on disk to weights and a decoder. Knows nothing of requests."""
