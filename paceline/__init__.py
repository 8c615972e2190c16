"""Paceline: exact speculative decoding for LLMs.

The public surface is small: `LLM` to run a model, `SamplingParams` (with a `Grammar`) and `Speculation` to say what is
wanted, and the errors of `paceline.errors`. Loaded on first use, so that `paceline --help` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline import moved

if TYPE_CHECKING:
    from paceline.llm import LLM, Answer, Sample
    from paceline.types import OFF, Finish, Grammar, Origin, SamplingParams, Speculation, TokenEvent

__version__ = "0.1.0"
moved.install()

__all__ = [
    "LLM",
    "OFF",
    "Answer",
    "Finish",
    "Grammar",
    "Origin",
    "Sample",
    "SamplingParams",
    "Speculation",
    "TokenEvent",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(import_module("paceline.llm" if name in ("LLM", "Answer", "Sample") else "paceline.types"), name)
