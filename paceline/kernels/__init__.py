"""Arithmetic on tensors: the plain-torch oracle, and the fast paths tested against it."""
