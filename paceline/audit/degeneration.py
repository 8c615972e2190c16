"""Answers that say nothing: loops, the same few words over and over, and answers that end too soon.

Such an answer is what a drafter likes best, so a speed measured on it says little about real use. This module looks at
tokens alone; it has no opinion on what a good answer is, and an honest list or table is not degenerate.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np

LOOP_TOKENS, LOOP_TIMES = 32, 4  # a loop goes on for so many tokens at least, and comes round so often
MAX_PERIOD = 256
GRAM, DISTINCT, REPEATS_FROM = 4, 0.4, 48  # less than this share of n-grams distinct, in answers of so many tokens
VOID_ABOVE = 0.1  # a speed claim is void if more of the answers are degenerate


class Sign(StrEnum):
    EMPTY = "empty"  # nothing but a stop
    LOOP = "loop"  # the same tokens come round and round
    REPEATS = "repeats"  # few different n-grams
    TRUNCATED = "truncated"  # it ends where the plain answer goes on


def degeneration(tokens: Sequence[int], *, stopped: bool, plain: Sequence[int] | None = None) -> Sign | None:
    """What is wrong with an answer. `stopped`: its last token is a stop; `plain`: what plain decoding said."""
    said = np.asarray(tokens[:-1] if stopped else tokens)
    if not len(said):
        return Sign.EMPTY
    if plain is not None and len(tokens) < len(plain) and list(plain[: len(tokens)]) == list(tokens):
        return Sign.TRUNCATED
    if _loops(said):
        return Sign.LOOP
    return Sign.REPEATS if _repeats(said) else None


def void(answers: int, degenerate: int) -> bool:
    """True: a speed measured on these answers is no claim."""
    return degenerate > VOID_ABOVE * answers


def _loops(said: np.ndarray) -> bool:
    """Some stretch repeats itself with one period, for long enough and often enough."""
    for period in range(1, min(MAX_PERIOD, len(said) // LOOP_TIMES) + 1):
        needed = max(LOOP_TOKENS, LOOP_TIMES * period) - period  # tokens that equal the one a period before
        if _longest_run(said[period:] == said[:-period]) >= needed:
            return True
    return False


def _longest_run(flags: np.ndarray) -> int:
    breaks = np.flatnonzero(~flags)
    edges = np.concatenate(([-1], breaks, [len(flags)]))
    return int(np.diff(edges).max()) - 1


def _repeats(said: np.ndarray) -> bool:
    if len(said) < REPEATS_FROM:
        return False
    grams = np.lib.stride_tricks.sliding_window_view(said, GRAM)  # [grams, GRAM]
    return len(np.unique(grams, axis=0)) < DISTINCT * len(grams)
