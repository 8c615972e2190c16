"""Hidden states that a head has not read yet, kept under the target's page ids in memory of a fixed size.

    page         7      3     12            of KV memory, in the order of a sequence's positions
    place        0      1      2            PAGE_SIZE rows of this memory each
    states   ████████████████▒▒░░░░         ▒ the last page is not whole yet

Keeping the states of a step is one copy for all sequences; nothing is computed. A page keeps its place until its states
have been read. When all places are taken, pages that no sequence holds lose theirs, the oldest first: they could only
have served a later sequence with the same beginning. If all pages are held by sequences, `place` returns None.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.base import PAGE_SIZE
from paceline.kernels.cpu.populate import Populated
from paceline.kv.pages import PageMarks, PagePool

MAX_KNOWN_SOURCES = 64  # feature tensors whose address is remembered


class Place(NamedTuple):
    """A block of float32 rows with its address."""

    rows: Tensor  # keeps the memory alive
    address: int
    length: int  # rows

    @classmethod
    def of(cls, rows: Tensor) -> Place:
        return cls(rows, rows.data_ptr(), len(rows))


class HiddenStateStore:
    def __init__(self, pool: PagePool, *, rows: int, width: int, device: torch.device | str) -> None:
        """Make room for `rows`, in whole pages, but never for more than the pool has."""
        places = min(max(rows // PAGE_SIZE, 1), pool.num_pages)
        shape = places * PAGE_SIZE, width
        on_cpu = str(device) == "cpu"
        # numpy's memory has large pages, whose first touch costs less
        self.memory = torch.from_numpy(np.empty(shape, np.float32)) if on_cpu else torch.empty(shape, device=device)
        self._own = Place.of(self.memory) if on_cpu else None
        self._populated = None if self._own is None else Populated(self._own.address, self.memory.nbytes)
        self._pool = pool
        self._free = list(range(places - 1, -1, -1))
        self._places: dict[int, int] = {}  # page → place, the oldest first
        self._current = PageMarks(pool)  # pages whose place was taken in their present epoch
        self._whole = PageMarks(pool)  # pages with the states of all their positions
        self._row_bytes = 4 * width
        self._reads: dict[int, Place] = {}  # number of rows → memory that they are read into
        self._sources: dict[int, Place] = {}  # id of a feature tensor → its address
        self._short = False  # a page found no room; see `is_short`
        self._searched = False  # the last search found too few places, and no sequence has stopped since

    def __contains__(self, page: int) -> bool:
        return page in self._whole

    def has_room(self, pages: int) -> bool:
        """Tell whether `pages` pages can get a place. Evicts pages that no sequence holds if it must."""
        if len(self._free) < pages and not self._searched:
            self._make_room(pages - len(self._free))
        return len(self._free) >= pages

    def place(self, page: int) -> int | None:
        """Return the first row of a page, and give it a place if it has none; None: there is no room."""
        if page not in self._places:
            if not self.has_room(1):
                self._short = True
                return None
            self._places[page] = place = self._free.pop()
            if self._populated is not None:
                self._populated.reach((place + 1) * PAGE_SIZE * self._row_bytes)
        self._current.add([page])
        return self._places[page] * PAGE_SIZE

    @property
    def is_short(self) -> bool:
        """True after a page found no room, until half of the memory is free again."""
        self._short = self._short and not self.has_room(len(self.memory) // PAGE_SIZE // 2)
        return self._short

    def complete(self, page: int) -> None:
        """Note that the last row of a page was written."""
        self._whole.add([page])

    def refresh(self, pages: Sequence[int]) -> None:
        """Make pages that are used again the youngest."""
        for page in pages:
            self._places[page] = self._places.pop(page)

    def leading(self, pages: Sequence[int]) -> int:
        """Count the pages that are whole before the first that is not."""
        return self._whole.leading(pages)

    def drop(self, pages: Sequence[int]) -> None:
        """Free the places of pages whose states no sequence needs any more."""
        for page in pages:
            if page in self._places:
                self._free.append(self._places.pop(page))
                self._whole.discard(page)

    def expect_room(self) -> None:
        """Search for room again the next time it is needed: a sequence stops, and its pages can be evicted."""
        self._searched = False

    def rows_of(self, pages: Sequence[int], start: int, stop: int) -> list[int]:
        """Return rows of the memory for positions `start` … `stop` - 1, counted from the start of the first page."""
        firsts = [self._places[page] * PAGE_SIZE for page in pages]
        return [firsts[position // PAGE_SIZE] + position % PAGE_SIZE for position in range(start, stop)]

    def write(self, features: Tensor, rows: Sequence[int], places: Sequence[int]) -> None:
        """Copy `rows` of features [any, width] to the rows `places` of the memory."""
        if self._own is None:
            self.memory[torch.tensor(places, device=self.memory.device)] = take_rows(features, rows).to(
                self.memory.device
            )
        else:
            self._copy(self._source(features), rows, self._own, places)

    def read(self, places: Sequence[int]) -> Tensor:
        """Return a copy [places, width] of rows of the memory; the next read of as many rows overwrites it."""
        if self._own is None:
            return take_rows(self.memory, places)
        count = len(places)
        if count not in self._reads:
            self._reads[count] = Place.of(torch.empty((count, self.memory.shape[1])))
        self._copy(self._own, places, self._reads[count], range(count))
        return self._reads[count].rows

    def _copy(self, source: Place, rows: Sequence[int], target: Place, places: Sequence[int]) -> None:
        """Copy runs of adjacent rows: with cold caches a call into torch or numpy costs tens of microseconds."""
        assert max(rows) < source.length, f"row {max(rows)} of {source.length}"
        size, count, first = self._row_bytes, len(rows), 0
        for end in range(1, count + 1):
            if end == count or rows[end] != rows[end - 1] + 1 or places[end] != places[end - 1] + 1:
                to, start = target.address + places[first] * size, source.address + rows[first] * size
                memmove(to, start, (end - first) * size)
                first = end

    def _source(self, features: Tensor) -> Place:
        """Look up the address of features; steps of one shape use the same tensor."""
        found = self._sources.get(id(features))
        if found is None:
            assert features.is_contiguous(), "rows of features must be adjacent in memory"
            if len(self._sources) == MAX_KNOWN_SOURCES:
                self._sources.clear()
            found = self._sources[id(features)] = Place.of(features)
        return found

    def _make_room(self, pages: int) -> None:
        """Free up to twice as many places as are needed, so that searches are rare."""
        useless = [page for page in self._places if not self._pool.holders(page) or page not in self._current]
        self.drop(useless[: 2 * pages])
        self._searched = len(useless) < pages


def take_rows(features: Tensor, rows: Sequence[int]) -> Tensor:
    """Copy rows of features [any, width]. On a CPU numpy does it: torch would wake threads and wait for cores."""
    if features.is_cpu:
        return torch.from_numpy(features.numpy()[rows])
    return features[torch.tensor(rows, device=features.device)]
