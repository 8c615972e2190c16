"""Triton kernels for CUDA devices. Tests compare each with the reference, on a GPU and in Triton's interpreter."""
