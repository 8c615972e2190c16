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

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.base import PAGE_SIZE
from paceline.kv.pages import PageMarks, PagePool

MANY = 16  # tensors that are known as arrays


class HeldStates:
    def __init__(self, pool: PagePool, *, rows: int, width: int, device: torch.device | str) -> None:
        """Room for so many `rows`, in whole pages, but never for more than the pool has."""
        places = min(max(rows // PAGE_SIZE, 1), pool.num_pages)
        shape = places * PAGE_SIZE, width
        self._array = np.empty(shape, dtype=np.float32) if str(device) == "cpu" else None  # of large pages of memory
        self.memory = torch.empty(shape, device=device) if self._array is None else torch.from_numpy(self._array)
        self._pool = pool
        self._free = list(range(places - 1, -1, -1))
        self._places: dict[int, int] = {}  # by page, the oldest first
        self._current = PageMarks(pool)  # whose place was taken in their present epoch
        self._whole = PageMarks(pool)  # all of whose positions have their states here
        self._arrays: dict[int, tuple[Tensor, np.ndarray]] = {}  # features that were written lately, also as arrays
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
        if self._array is None:
            self.memory[torch.tensor(places, device=self.memory.device)] = take_rows(features, rows).to(
                self.memory.device
            )
        else:
            array = self._as_array(features)
            self._array[places] = array if len(rows) == len(array) else array[rows]

    def read(self, places: Sequence[int]) -> Tensor:
        """[places, width], a copy."""
        return take_rows(self.memory, places) if self._array is None else torch.from_numpy(self._array[places])

    def _as_array(self, features: Tensor) -> np.ndarray:
        """Steps of one shape use the same tensor. With cold caches every call into torch costs tens of microseconds."""
        if len(self._arrays) == MANY:
            self._arrays.clear()
        if id(features) not in self._arrays:
            self._arrays[id(features)] = features, features.numpy()
        return self._arrays[id(features)][1]

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
