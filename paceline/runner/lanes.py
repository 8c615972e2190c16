"""The device's side of the running sequences: a table with one lane a sequence.

    tokens   [lanes, width]   committed tokens, then the draft being verified
    lengths  [lanes]          how many of them are committed
    pages    [lanes, pages]   the page table; -1 where there is no page yet

A forward pass reads tokens and pages by (lane, position), a drafter writes its guess behind the committed tokens, and
acceptance moves `lengths`: draft → verify → accept need nothing else, so that a device can run them without the host.
On a CPU the host sees the same memory through the `*_np` views.
"""

from __future__ import annotations

import numpy as np
import torch

from paceline.kernels.base import PAGE_SIZE, Batch

Memory = tuple[Batch, np.ndarray, np.ndarray]
"""The tensors of a pass, and as arrays all its values but the page table, and that."""


class Lanes:
    def __init__(self, *, count: int, max_context: int, max_draft: int) -> None:
        width = max_context + max_draft + 1
        self.tokens = torch.zeros((count, width), dtype=torch.int32)
        self.lengths = torch.zeros(count, dtype=torch.int32)
        self.pages = torch.full((count, -(-width // PAGE_SIZE)), -1, dtype=torch.int32)
        self.tokens_np = self.tokens.numpy()
        self.lengths_np = self.lengths.numpy()
        self.pages_np = self.pages.numpy()
        self.memories: dict[tuple[int, ...], Memory] = {}  # of passes, by shape; see runner/batch.py
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def pages_of(self, lane: int, first: int, last: int) -> list[int]:
        """Pages `first` … `last` - 1 of a lane's table."""
        pages: list[int] = self.pages_np[lane, first:last].tolist()
        return pages

    def take(self) -> int:
        return self._free.pop()

    def give_back(self, lane: int) -> None:
        assert lane not in self._free, f"lane {lane} given back twice"
        self._free.append(lane)
