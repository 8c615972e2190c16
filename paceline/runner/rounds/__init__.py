"""Rounds on a device: draft, verify and accept without the host in between."""
