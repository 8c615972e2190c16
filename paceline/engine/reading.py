"""The pace at which prompts are read, and how much of one fits into a time.

A row of a prompt costs its products, and attention to all positions before it:

    seconds of rows [start, start + count)  =  count · (products + attention · (start + count / 2))

Both are fitted to the latest steps. Until steps with different contexts have been seen, their ratio is the one that the
model's operations suggest: at `even_context` positions attention costs as much as the products. Few rows say nothing,
because a pass over them takes as long as reading the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

FIRST_ROWS = 512  # rows of a chunk while the pace is not known
LEAST_ROWS = 16  # rows that a chunk may have in any case
TELLING_ROWS = 256  # rows of a step from which the pace is learnt (H200: fewer are bound by memory)
DECAY = 0.8  # weight of the past at each step: about the last five count
PRIOR = 0.002  # weight of the ratio that the model suggests, relative to that of the steps
OUTLIER = 2.0  # factor: a slower step counts as this many times the expected time; a faster one forgets the past
FEW_SIZES = 64  # rows: chunks are multiples of this, or of a quarter of the next power of two, as `profile` runs them


class ReadingPace:
    def __init__(self, *, even_context: float = math.inf) -> None:
        self._even_context = min(even_context, 1e9)
        self._weight = self._x = self._y = self._xx = self._xy = 0.0  # sums over steps: context, seconds of a row
        self._products: float | None = None  # seconds of a row; None: not known
        self._attention = 0.0  # seconds of a row for each position before it
        self._allowed = TELLING_ROWS  # rows that a step was last allowed

    def learn(self, chunks: Iterable[tuple[int, int]], seconds: float) -> None:
        """Learn from a step that read chunks (start, count) of prompts."""
        parts = list(chunks)
        rows = sum(count for _, count in parts)
        if not seconds or rows < min(TELLING_ROWS, self._allowed):
            return
        context = sum(count * (start + count / 2) for start, count in parts) / rows
        self._add(context, seconds / rows)
        self._fit()

    def rows(self, seconds: float, *, start: int) -> int:
        """Return how many rows from `start` on can be read in `seconds`, rounded down to one of few sizes: the first
        pass of a size takes longer, because the ways of its products are compared."""
        if self._products is None:
            return FIRST_ROWS
        base = self._products + start * self._attention  # count · base + count² · attention / 2 = seconds
        count = int(2 * seconds / (base + math.sqrt(base * base + 2 * self._attention * seconds)))
        step = max(FEW_SIZES, (1 << max(count - 1, 0).bit_length()) // 4)
        self._allowed = count // step * step or max(count, LEAST_ROWS)
        return self._allowed

    def _add(self, context: float, seconds: float) -> None:
        """Add a step. Other work, or the compilation of a kernel, causes outliers: they count little."""
        decay = DECAY
        if self._products is not None:
            expected = self._products + context * self._attention
            decay = DECAY if seconds > expected / OUTLIER else 0.0
            seconds = min(seconds, OUTLIER * expected)
        self._weight = decay * self._weight + 1
        self._x = decay * self._x + context
        self._y = decay * self._y + seconds
        self._xx = decay * self._xx + context * context
        self._xy = decay * self._xy + context * seconds

    def _fit(self) -> None:
        """Solve for the least squares, with a term that draws products towards even_context · attention."""
        even, prior = self._even_context, PRIOR * self._weight
        cross = self._x - prior * even
        determinant = (self._weight + prior) * (self._xx + prior * even * even) - cross * cross
        attention = ((self._weight + prior) * self._xy - cross * self._y) / determinant
        mean = self._y / self._weight
        self._attention = min(max(attention, 0.0), 0.9 * mean / max(self._x / self._weight, 1.0))
        self._products = mean - self._attention * self._x / self._weight
