"""The pace at which prompts are read, and how much of one fits into a time.

A row of a prompt costs its products, and attention to all positions before it:

    seconds of rows [start, start + count)  =  pace · count · (1 + (start + count / 2) / even_context)

`even_context` is the context at which attention costs as much as the products. It belongs to the model; the pace is
measured. Few rows say nothing about the pace, because a pass over them takes as long as reading the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

FIRST_ROWS = 512  # rows of a chunk while the pace is not known
LEAST_ROWS = 16  # rows that a chunk may have in any case
TELLING_ROWS = 256  # rows of a step from which the pace is learnt (H200: fewer are bound by memory)
DECAY = 0.5  # weight of the past: context and neighbours change within a prompt
FEW_SIZES = 64  # rows: chunks are multiples of this, or of an eighth of the next power of two, as passes are padded


class ReadingPace:
    def __init__(self, *, even_context: float = math.inf) -> None:
        self._even_context = even_context
        self._seconds: float | None = None  # seconds of a row without attention; None: not known
        self._allowed = TELLING_ROWS  # rows that a step was last allowed

    def learn(self, chunks: Iterable[tuple[int, int]], seconds: float) -> None:
        """Learn from a step that read chunks (start, count) of prompts. A better time counts in full: a worse one may
        be the compilation of a kernel."""
        parts = list(chunks)
        if not seconds or sum(count for _, count in parts) < min(TELLING_ROWS, self._allowed):
            return
        each = seconds / sum(self._units(start, count) for start, count in parts)
        known = each if self._seconds is None else self._seconds
        self._seconds = min(each, DECAY * known + (1 - DECAY) * each)

    def rows(self, seconds: float, *, start: int) -> int:
        """Return how many rows from `start` on can be read in `seconds`, rounded down to what passes are padded to."""
        if self._seconds is None:
            return FIRST_ROWS
        self._allowed = self._rows(seconds / self._seconds, start)
        return self._allowed

    def _rows(self, units: float, start: int) -> int:
        slope = 1 / self._even_context
        base = 1 + start * slope  # count · base + count² · slope / 2 = units
        count = int(2 * units / (base + math.sqrt(base * base + 2 * slope * units)))
        step = max(FEW_SIZES, (1 << max(count - 1, 0).bit_length()) // 8)
        return count // step * step or max(count, LEAST_ROWS)

    def _units(self, start: int, count: int) -> float:
        return count * (1 + (start + count / 2) / self._even_context)
