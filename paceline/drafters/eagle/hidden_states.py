"""Hidden states that a head has not read yet, kept under the target's page ids in memory of a fixed size.

    page         7      3     12            of KV memory, in the order of a sequence's positions
    place        0      1      2            PAGE_SIZE rows of this memory each
    states   ████████████████▒▒░░░░         ▒ the last page is not whole yet

To keep a step's states is one copy, whoever they are of; nothing is computed. A page keeps its place until its states
have been read. When all places are taken, those go first whose pages nobody holds, the oldest first: they would only
have been of use to a later sequence with the same beginning. If there are none there is no room.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.base import PAGE_SIZE
from paceline.kv.pages import PageMarks, PagePool

MANY = 64  # tensors whose place is known


class Place(NamedTuple):
    """Where rows of float32 lie."""

    rows: Tensor  # kept, for its memory
    address: int
    length: int

    @classmethod
    def of(cls, rows: Tensor) -> Place:
        return cls(rows, rows.data_ptr(), len(rows))


class HeldStates:
    def __init__(self, pool: PagePool, *, rows: int, width: int, device: torch.device | str) -> None:
        """Room for so many `rows`, in whole pages, but never for more than the pool has."""
        places = min(max(rows // PAGE_SIZE, 1), pool.num_pages)
        shape = places * PAGE_SIZE, width
        on_cpu = str(device) == "cpu"
        # numpy asks for large pages of memory
        self.memory = torch.from_numpy(np.empty(shape, np.float32)) if on_cpu else torch.empty(shape, device=device)
        self._own = Place.of(self.memory) if on_cpu else None
        self._pool = pool
        self._free = list(range(places - 1, -1, -1))
        self._places: dict[int, int] = {}  # by page, the oldest first
        self._current = PageMarks(pool)  # whose place was taken in their present epoch
        self._whole = PageMarks(pool)  # all of whose positions have their states here
        self._row_bytes = 4 * width
        self._reads: dict[int, Place] = {}  # memory to read into, by rows
        self._sources: dict[int, Place] = {}  # features that were written lately, by id
        self._short = False
        self._searched = False  # in vain, since somebody last let go

    def __contains__(self, page: int) -> bool:
        return page in self._whole

    def has_room(self, pages: int) -> bool:
        if len(self._free) < pages and not self._searched:
            self._make_room(pages - len(self._free))
        return len(self._free) >= pages

    def place(self, page: int) -> int | None:
        """The first row of a page; None: there is no room for it."""
        if page not in self._places:
            if not self.has_room(1):
                self._short = True
                return None
            self._places[page] = self._free.pop()
        self._current.add([page])
        return self._places[page] * PAGE_SIZE

    @property
    def is_short(self) -> bool:
        """Somebody found no room, and since then less than half of it has become free."""
        self._short = self._short and not self.has_room(len(self.memory) // PAGE_SIZE // 2)
        return self._short

    def complete(self, page: int) -> None:
        """The last row of a page is there."""
        self._whole.add([page])

    def refresh(self, pages: Sequence[int]) -> None:
        """Pages that are of use again become the youngest."""
        for page in pages:
            self._places[page] = self._places.pop(page)

    def leading(self, pages: Sequence[int]) -> int:
        """How many of these are whole before the first that is not."""
        return self._whole.leading(pages)

    def drop(self, pages: Sequence[int]) -> None:
        """Their states are no longer needed, by anybody."""
        for page in pages:
            if page in self._places:
                self._free.append(self._places.pop(page))
                self._whole.discard(page)

    def expect_room(self) -> None:
        """Somebody lets go of pages: looking for room may be worth while again."""
        self._searched = False

    def rows_of(self, pages: Sequence[int], start: int, stop: int) -> list[int]:
        """Rows of the memory, of positions `start` … `stop` - 1 counted from the beginning of the first page."""
        firsts = [self._places[page] * PAGE_SIZE for page in pages]
        return [firsts[position // PAGE_SIZE] + position % PAGE_SIZE for position in range(start, stop)]

    def write(self, features: Tensor, rows: Sequence[int], places: Sequence[int]) -> None:
        """Rows of features [any, width] go to these rows of the memory."""
        if self._own is None:
            self.memory[torch.tensor(places, device=self.memory.device)] = take_rows(features, rows).to(
                self.memory.device
            )
        else:
            self._copy(self._source(features), rows, self._own, places)

    def read(self, places: Sequence[int]) -> Tensor:
        """[places, width], a copy that lasts until as many are read again."""
        if self._own is None:
            return take_rows(self.memory, places)
        count = len(places)
        if count not in self._reads:
            self._reads[count] = Place.of(torch.empty((count, self.memory.shape[1])))
        self._copy(self._own, places, self._reads[count], range(count))
        return self._reads[count].rows

    def _copy(self, source: Place, rows: Sequence[int], target: Place, places: Sequence[int]) -> None:
        """With cold caches every call into torch costs tens of microseconds, and one into numpy not much less."""
        assert max(rows) < source.length, f"row {max(rows)} of {source.length}"
        size = self._row_bytes
        for row, place in zip(rows, places, strict=True):
            memmove(target.address + place * size, source.address + row * size, size)

    def _source(self, features: Tensor) -> Place:
        """Steps of one shape use the same tensor."""
        found = self._sources.get(id(features))
        if found is None:
            assert features.is_contiguous(), "features of adjacent rows lie side by side"
            if len(self._sources) == MANY:
                self._sources.clear()
            found = self._sources[id(features)] = Place.of(features)
        return found

    def _make_room(self, pages: int) -> None:
        """Twice as much as is needed, so as not to look for each page."""
        useless = [page for page in self._places if not self._pool.holders(page) or page not in self._current]
        self.drop(useless[: 2 * pages])
        self._searched = len(useless) < pages


def take_rows(features: Tensor, rows: Sequence[int]) -> Tensor:
    """A copy of rows of features [any, width]. On a CPU by numpy: torch would wake its own threads for it, and has to
    wait until they are given a core."""
    if features.is_cpu:
        return torch.from_numpy(features.numpy()[rows])
    return features[torch.tensor(rows, device=features.device)]
