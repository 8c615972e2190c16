"""Paceline: exact speculative decoding for LLMs.

The public surface is small: `LLM` to run a model, `SamplingParams` and `Speculation` to say what is
wanted, and the errors that can come back.
"""

__version__ = "0.1.0"
