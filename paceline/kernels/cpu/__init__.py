"""The fast CPU path: C compiled on the user's machine, run through ctypes as one call for a forward pass."""
