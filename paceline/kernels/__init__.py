"""Arithmetic on tensors: the oracle in plain torch, and the faster kernels that are tested against it."""
