"""Models: from files on disk to weights and a decoder. It does not depend on requests."""
