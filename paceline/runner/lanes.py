"""Lanes: tables of the running sequences, one row for each sequence.

    tokens   [lanes, width]   committed tokens, then the draft being verified
    lengths  [lanes]          number of committed tokens
    pages    [lanes, pages]   page table; -1: no page yet

A forward pass reads tokens and pages by (lane, position), a drafter writes its guess behind the committed tokens, and
acceptance moves `lengths`. Draft, verify and accept need nothing else, so that a device can run them without the host
(`runner/rounds/device_state.py` has its tables). On a CPU the host reads the same memory through the `*_np` views, and
lane by lane through the memoryviews `texts` and `tables`: after a pass the caches are cold, and a slice of a memoryview
touches the least memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline.kernels.base import PAGE_SIZE

if TYPE_CHECKING:
    from paceline.runner.batch import BatchMemory, BatchShape


class Lanes:
    """The tables, and which lanes are free."""

    def __init__(self, *, count: int, max_context: int, max_draft: int) -> None:
        width = max_context + max_draft + 1
        self.tokens = torch.zeros((count, width), dtype=torch.int32)
        self.lengths = torch.zeros(count, dtype=torch.int32)
        self.pages = torch.full((count, -(-width // PAGE_SIZE)), -1, dtype=torch.int32)
        self.tokens_np = self.tokens.numpy()
        self.lengths_np = self.lengths.numpy()
        self.pages_np = self.pages.numpy()
        self.texts = [row.data for row in self.tokens_np]  # tokens of each lane
        self.tables = [row.data for row in self.pages_np]  # pages of each lane
        self.batch_memories: dict[BatchShape, BatchMemory] = {}  # see runner/batch.py
        self._lengths = self.lengths_np.data
        self._views = [_read_only(row) for row in self.tokens_np]
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def view(self, lane: int, length: int) -> np.ndarray:
        """Return the first `length` tokens of a lane, read-only."""
        return self._views[lane][:length]

    def write(self, lane: int, start: int, tokens: Sequence[int]) -> None:
        text = self.texts[lane]
        for place, token in enumerate(tokens, start):
            text[place] = token

    def commit(self, lane: int, length: int, tokens: Sequence[int]) -> None:
        """Commit tokens behind the `length` that are committed already."""
        text, end = self.texts[lane], length
        for token in tokens:
            text[end] = token
            end += 1
        self._lengths[lane] = end

    def pages_of(self, lane: int, first: int, last: int) -> list[int]:
        """Return pages `first` … `last` - 1 of a lane's table."""
        pages: list[int] = self.tables[lane][first:last].tolist()
        return pages

    def slots_of(self, lane: int, start: int, stop: int) -> list[int]:
        """Return the KV slots of positions `start` … `stop` - 1."""
        first = start // PAGE_SIZE
        pages = self.tables[lane][first : -(-stop // PAGE_SIZE)].tolist()
        return [pages[place // PAGE_SIZE - first] * PAGE_SIZE + place % PAGE_SIZE for place in range(start, stop)]

    def take(self) -> int:
        """Take a free lane."""
        return self._free.pop()

    def give_back(self, lane: int) -> None:
        assert lane not in self._free, f"lane {lane} given back twice"
        self._free.append(lane)


def _read_only(row: np.ndarray) -> np.ndarray:
    view = row.view()
    view.flags.writeable = False
    return view
