"""Kernels for CUDA devices, in Triton. Each is checked against `kernels.reference`, by Triton's interpreter too."""
