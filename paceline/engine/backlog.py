"""Hidden states of steps in which no head drafts, until the drafters that read them are told.

    memory   │ step 1: a b c │ step 2: a b c │ step 3: a b c │ ░░░░          a, b, c: one row of each sequence

While too many sequences run for a head to draft, nobody needs a step's states before some later step. Keeping them is
one copy; the drafters get the states of many steps at once. Rows of a sequence are those of adjacent positions; rows of
copied drafts that were rejected are among them, and nobody's.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from ctypes import memmove

import torch
from torch import Tensor

from paceline.drafters.base import Seen
from paceline.engine.scheduler import Work

MAX_ROWS = 256  # of the memory: 1.8 MB of SmolLM2, 32 steps of eight sequences


class Backlog:
    def __init__(self) -> None:
        self._memory: Tensor | None = None  # [MAX_ROWS, taps * hidden]
        self._address = self._row_bytes = 0
        self.used = 0  # rows; 0: nothing is kept
        self._rows: dict[int, list[int]] = {}  # sequence → rows of the memory
        self._starts: dict[int, int] = {}  # sequence → position of its first row

    def add(self, works: Seq[Work], features: Tensor, *, rows: int) -> bool:
        """Keep the first `rows` of features, which are those of the works. False: there is no room."""
        first = self.used
        if first + rows > MAX_ROWS or not self._fits(features):
            return False
        memmove(self._address + first * self._row_bytes, features.data_ptr(), rows * self._row_bytes)
        self.used += rows
        kept, starts = self._rows, self._starts
        for work in works:
            key, final = work.sequence.key, work.final_rows(first + work.first_row)
            if key in kept:
                kept[key] += final
            else:
                kept[key], starts[key] = [*final], work.start
        return True

    def forget(self, key: int) -> None:
        """Drop the states of a sequence."""
        self._rows.pop(key, None)

    def take(self) -> tuple[Tensor, list[Seen]]:
        """Return all states, and whose they are. They are valid until the next `add`."""
        assert self._memory is not None
        seen = [Seen(key, self._starts[key], rows) for key, rows in self._rows.items()]
        self._rows, self._starts, self.used = {}, {}, 0
        return self._memory, seen

    def _fits(self, features: Tensor) -> bool:
        """Tell whether rows can be copied as they lie. The first features decide on the width of the memory."""
        if self._memory is None and features.is_cpu and features.dtype == torch.float32:
            self._memory = torch.empty((MAX_ROWS, features.shape[1]))
            self._address, self._row_bytes = self._memory.data_ptr(), 4 * features.shape[1]
        return self._memory is not None and features.is_contiguous()
