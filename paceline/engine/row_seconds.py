"""Seconds of a pass over few rows, by their number.

Kernels compute rows in blocks. So one more row of a small pass costs next to nothing or a fifth of the pass, by its
place in a block, and a line through all passes says neither. Other work changes the speed of the machine from second to
second. So the table keeps *ratios* between passes, which stay, and a *pace*, which follows the latest passes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from statistics import median

MAX_ROWS = 32  # rows of the largest pass in the table
PACE_OUTLIER, RATIO_OUTLIER = 2.0, 1.25  # factors by which an error of the pace, or of a ratio, counts at most
PACE_SHARE = 0.2  # part of an error, as an exponent, by which the pace is corrected
TIMED_PASSES = 16  # passes in traffic that one weighs as much as that was made to be timed
RATIO_SHARE = 0.02  # part of an error, as an exponent, by which a ratio is corrected at least; more while it is new


class RowSeconds:
    def __init__(self) -> None:
        self._pace = 0.0  # seconds of a pass with ratio 1; 0: nothing was measured
        self._ratios: dict[int, float] = {}  # rows → seconds of their pass, by the pace
        self._timed: dict[int, list[float]] = {}  # rows → ratios of passes that were made to be timed
        self.passes: dict[int, int] = {}  # rows → passes that were measured

    @property
    def knows(self) -> bool:
        """True if passes over two different numbers of rows were measured."""
        return len(self._ratios) > 1

    def add(self, rows: int, seconds: float) -> None:
        """Learn from a pass. Passes over many rows are left out."""
        if rows > MAX_ROWS or seconds <= 0:
            return
        passes = self.passes.get(rows, 0)
        self.passes[rows] = passes + 1
        if not self._pace:
            self._pace = seconds
        expected = self._ratios[rows] if passes else self._interpolated(rows)
        error = seconds / (self._pace * expected)
        bounded = min(max(error, 1 / RATIO_OUTLIER), RATIO_OUTLIER)
        self._ratios[rows] = expected * bounded ** max(1 / (passes + 1), RATIO_SHARE)
        if passes:
            self._pace *= min(max(error, 1 / PACE_OUTLIER), PACE_OUTLIER) ** PACE_SHARE

    def time(self, rows: int, seconds: float, *, beside: float = 0.0) -> None:
        """Learn from a pass that was made to be timed, while nothing else ran: the median of such passes counts, but
        no more than for more rows: only other work makes a pass over fewer rows take longer.
        `beside`: seconds of a pass over one row at the same time; 0: the machine is as quick as it was at first.

        One pass at a quick moment would make its rows cheap for ever: the pace follows the passes that run, and
        where a table says that more rows are dear they do not run."""
        self._pace = self._pace or beside or seconds
        timed = self._timed.setdefault(rows, [])
        timed.append(seconds / (beside or self._pace))
        most = math.inf
        for each in sorted(self._timed, reverse=True):
            most = self._ratios[each] = min(median(self._timed[each]), most)
        self.passes[rows] = self.passes.get(rows, 0) + TIMED_PASSES

    def seconds(self, rows: int) -> float:
        """Return the seconds of a pass, by neighbouring numbers of rows if it was not measured."""
        return self._pace * (self._ratios.get(rows) or self._interpolated(rows))

    def _interpolated(self, rows: int) -> float:
        """Return the ratio of a pass on the line through the two measured ones beside it, which is its own if it was
        measured. Beyond all of them it lies between the nearest ratio and one in proportion to the rows."""
        known, ratios = sorted(self._ratios), self._ratios
        if len(known) < 2:
            return ratios[known[0]] if known else 1.0
        at = min(max(bisect_left(known, rows), 1), len(known) - 1)
        low, high = known[at - 1], known[at]
        ratio = ratios[low] + (ratios[high] - ratios[low]) * (rows - low) / (high - low)
        if low <= rows <= high:
            return ratio
        nearest = low if rows < low else high
        bounds = ratios[nearest], ratios[nearest] * rows / nearest
        return min(max(ratio, min(bounds)), max(bounds))
