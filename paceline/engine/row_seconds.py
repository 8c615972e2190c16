"""Seconds of a pass over few rows, by their number.

Kernels compute rows in blocks. So one more row of a small pass costs next to nothing or a fifth of the pass, by its
place in a block, and a line through all passes says neither. Other work changes the speed of the machine from second to
second. So the table keeps *ratios* between passes, which stay, and a *pace*, which follows the latest passes.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort

MAX_ROWS = 32  # rows of the largest pass in the table
PACE_OUTLIER, RATIO_OUTLIER = 2.0, 1.25  # factors by which an error of the pace, or of a ratio, counts at most
PACE_SHARE = 0.2  # part of an error, as an exponent, by which the pace is corrected
TIMED_PASSES = 16  # passes in traffic that one weighs as much as that was made to be timed
QUICK_SHARE = 0.2  # of the passes over one row beside others: so many are quicker than the one that counts
PASSES_TO_LEAVE_ONE = 3  # passes over as many rows, beside the one that counts, for each that is left out as too quick
RATIO_SHARE = 0.02  # part of an error, as an exponent, by which a ratio is corrected at least; more while it is new


class RowSeconds:
    def __init__(self) -> None:
        self._pace = 0.0  # seconds of a pass with ratio 1; 0: nothing was measured
        self._ratios: dict[int, float] = {}  # rows → seconds of their pass, by the pace
        self._timed: dict[int, list[float]] = {}  # rows → seconds of passes that were made to be timed, sorted
        self._beside: list[float] = []  # seconds of passes over one row that were made beside them, sorted
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
        """Learn from a pass that was made to be timed. Other work makes a pass longer, and a quick moment of the
        machine makes one shorter: so of a few passes the quickest counts, of four and more the second.
        `beside`: seconds of a pass over one row at the same time; 0: the machine is as quick as it was at first.

        A table that says that rows are dear keeps them from being measured in traffic. So it also holds that a pass
        over more rows is never quicker, and takes no longer than in proportion to the rows."""
        self._pace = self._pace or beside or seconds
        insort(self._timed.setdefault(rows, []), seconds)
        if beside:
            insort(self._beside, beside)
        one = self._beside[int(QUICK_SHARE * (len(self._beside) - 1))] if self._beside else self._pace
        each_row, cheapest = math.inf, math.inf
        for count, timed in sorted(self._timed.items()):
            each_row = min(timed[(len(timed) - 1) // PASSES_TO_LEAVE_ONE] / one / count, each_row)
            self._ratios[count] = each_row * count
        for count in sorted(self._timed, reverse=True):
            cheapest = self._ratios[count] = min(self._ratios[count], cheapest)
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
