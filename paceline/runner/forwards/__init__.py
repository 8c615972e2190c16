"""Forwards: the passes of a model, in plain torch, in compiled C for CPUs, and in Triton for GPUs."""
