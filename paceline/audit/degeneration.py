"""Degenerate answers: loops, few distinct n-grams, and answers that end too soon.

Such answers are easy to draft, so a speed measured on them says little about real use. This module looks at tokens
alone, not at the quality of an answer; an ordinary list or table is not degenerate.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np

MIN_LOOP_TOKENS, MIN_LOOP_TURNS = 32, 4  # length of a loop in all, and repetitions of its period
MAX_PERIOD = 256  # tokens
GRAM_TOKENS = 4
MIN_DISTINCT_SHARE = 0.4  # distinct n-grams by all n-grams; less is degenerate
MIN_REPEATS_TOKENS = 48  # shorter answers are not tested for distinct n-grams
MAX_DEGENERATE_SHARE = 0.1  # degenerate answers by all answers; more make a speed claim void


class Sign(StrEnum):
    EMPTY = "empty"  # nothing but a stop token
    LOOP = "loop"  # the same tokens again and again
    REPEATS = "repeats"  # few distinct n-grams
    TRUNCATED = "truncated"  # ends where the plain answer continues


def degeneration(tokens: Sequence[int], *, stopped: bool, plain: Sequence[int] | None = None) -> Sign | None:
    """The sign of degeneration that an answer shows. `stopped`: its last token is a stop; `plain`: the plain answer."""
    said = np.asarray(tokens[:-1] if stopped else tokens)
    if not len(said):
        return Sign.EMPTY
    if plain is not None and len(tokens) < len(plain) and list(plain[: len(tokens)]) == list(tokens):
        return Sign.TRUNCATED
    if _loops(said):
        return Sign.LOOP
    return Sign.REPEATS if _repeats(said) else None


def void(answers: int, degenerate: int) -> bool:
    """True if too many answers are degenerate for a speed measured on them to count."""
    return degenerate > MAX_DEGENERATE_SHARE * answers


def _loops(said: np.ndarray) -> bool:
    """True if some stretch repeats with one period, long enough and often enough."""
    for period in range(1, min(MAX_PERIOD, len(said) // MIN_LOOP_TURNS) + 1):
        needed = max(MIN_LOOP_TOKENS, MIN_LOOP_TURNS * period) - period  # tokens that equal the token one period before
        if _longest_run(said[period:] == said[:-period]) >= needed:
            return True
    return False


def _longest_run(flags: np.ndarray) -> int:
    breaks = np.flatnonzero(~flags)
    edges = np.concatenate(([-1], breaks, [len(flags)]))
    return int(np.diff(edges).max()) - 1


def _repeats(said: np.ndarray) -> bool:
    if len(said) < MIN_REPEATS_TOKENS:
        return False
    grams = np.lib.stride_tricks.sliding_window_view(said, GRAM_TOKENS)  # [grams, GRAM_TOKENS]
    return len(np.unique(grams, axis=0)) < MIN_DISTINCT_SHARE * len(grams)
