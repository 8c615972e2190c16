"""Pages of keys and values: which sequences hold them, and which contain a reusable prefix."""
