"""Costs of steps: seconds by drafter, number of sequences and rows, from measured steps.

Everything that a step takes is in its seconds: drafting, the pass, accepting, the host's own work. Rows stand for the
draft length, so lookups, whose drafts differ in length, need no other model than heads. Means count, because other
work on the machine is a part of what users wait for; a single step counts for OUTLIER medians at most.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from paceline.engine.row_seconds import RowSeconds
from paceline.tune.traces import Step

MIN_STEPS = 5  # steps of about as many rows whose mean counts, if there are so many
FURTHER = 1.25  # from this many times the rows of the mean before them, fewer than MIN_STEPS count, too
OUTLIER = 3.0  # times the median that a step counts for at most
Table = dict[int, float]  # rows → seconds of a step


class StepCosts:
    """Costs of the steps of one drafter, or of plain steps."""

    def __init__(self, tables: Mapping[int, Table], reading: Mapping[int, float] | None = None) -> None:
        """Both by the number of sequences. `reading`: seconds for each token of a prompt, see `tune.step_timing`."""
        assert tables, "costs need measured steps"
        self._reading = dict(reading or {})
        self._rows: dict[int, RowSeconds] = {}
        for sequences, table in tables.items():
            self._rows[sequences] = known = RowSeconds()
            for rows, seconds in table.items():
                known.time(rows, seconds)

    def reading(self, sequences: int) -> float:
        """Return the seconds that a drafter takes for each token of a prompt, after the prompt was read."""
        places = sorted(self._reading)
        return float(np.interp(sequences, places, [self._reading[place] for place in places])) if places else 0.0

    def seconds(self, sequences: int, rows: float) -> float:
        """Return the seconds of a step. Between two measured numbers of sequences it lies on the line through both,
        each with as many rows a sequence."""
        known = sorted(self._rows)
        at = bisect_left(known, sequences)
        beside = {known[max(at - 1, 0)], known[min(at, len(known) - 1)]}
        low, high = min(beside), max(beside)
        first = self._rows[low].seconds(round(rows * low / sequences))
        if low == high or sequences <= low:
            return first
        last = self._rows[high].seconds(round(rows * high / sequences))
        return first + (last - first) * (sequences - low) / (high - low)


def table_of(steps: Iterable[Step]) -> Table:
    """Return the mean seconds of steps by rows. Neighbouring numbers of rows with few steps each count as one.

    A few steps with many more rows than all others have a mean of their own: what lies beyond the last one is guessed,
    and drafts of eight lookups vary so much that steps of three times as many rows were."""
    by_rows: dict[int, list[float]] = {}
    for step in steps:
        by_rows.setdefault(step.rows, []).append(step.seconds)
    found: Table = {}
    group: list[tuple[int, float]] = []
    for rows in sorted(by_rows):
        group += [(rows, seconds) for seconds in by_rows[rows]]
        if len(group) >= MIN_STEPS:
            found |= _point(group)
            group = []
    if group and (not found or group[-1][0] > FURTHER * max(found)):
        found |= _point(group)
    return found


def _point(group: Sequence[tuple[int, float]]) -> Table:
    rows = round(statistics.fmean(rows for rows, _ in group))
    most = OUTLIER * statistics.median(seconds for _, seconds in group)
    return {rows: statistics.fmean(min(seconds, most) for _, seconds in group)}


def stored(table: Table) -> list[list[float]]:
    """Return a table as JSON, which has no integers as keys."""
    return [[rows, seconds] for rows, seconds in sorted(table.items())]


def read(pairs: Sequence[Any]) -> Table:
    return {int(rows): float(seconds) for rows, seconds in pairs}
