"""Where keys and values live: pages, who holds them, and which are known to hold a reusable prefix."""
