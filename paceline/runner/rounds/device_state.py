"""The tables of the running sequences on a device: one lane for each, with all that a round needs.

    tokens   [lanes + 1, width]   committed tokens, then the draft being verified
    lengths  [lanes + 1]          number of committed tokens
    pages    [lanes + 1, pages]   page table
    parents  [lanes + 1, nodes]   the node that each node of a drafted tree follows, see Draft

The host writes a lane when a sequence starts, or when the host itself has changed it; in between, rounds advance tokens
and lengths without the host. The last lane is a dummy of length 1 on the scratch page, for seats that only pad a batch.

All tables that the host writes are in one piece of memory, so that any set of changes is one list of (index, value).
`Changes` collects the host's changes until the next launch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.base import PAGE_SIZE
from paceline.sampling.sampler import Sampler


class DeviceState:
    """The tables. Implements TreeLanes of kernels/tree_reference.py."""

    def __init__(
        self, *, lanes: int, width: int, scratch_page: int, device: torch.device | str, max_draft: int = 0
    ) -> None:
        self.dummy = lanes
        self.scratch_page = scratch_page
        self.device = torch.device(device)
        count, pages = lanes + 1, -(-width // PAGE_SIZE)
        sizes = [2 * count, count, count, count, count, count, count * pages, count * width]
        self.memory = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        tables = self.memory.split_with_sizes(sizes)
        # Sampling parameters, each [lanes + 1], as defined in sampling/sampler.py.
        self.seed = tables[0].view(torch.int64)  # bits of the unsigned seed
        self.inverse_temperature = tables[1].view(torch.float32)  # 0: greedy
        self.top_k = tables[2]  # 0: off
        self.top_p = tables[3].view(torch.float32)  # 1: off
        self.min_p = tables[4].view(torch.float32)  # 0: off
        self.lengths = tables[5]
        self.pages = tables[6].view(count, pages)
        self.tokens = tables[7].view(count, width)
        self.top_p.fill_(1.0)
        self.lengths.fill_(1)
        self.pages.fill_(scratch_page)
        self.parents = torch.arange(-1, max_draft - 1, dtype=torch.int32, device=device).repeat(count, 1)  # chains


class Changes:
    """Values that the host writes to a DeviceState, by index into its memory; later changes replace earlier ones."""

    def __init__(self, state: DeviceState, *, vocab_size: int) -> None:
        self._state = state
        self._vocab_size = vocab_size
        self._pieces: list[tuple[np.ndarray, np.ndarray]] = []  # indices and values

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def write(self, lane: int, tokens: np.ndarray, sampler: Sampler) -> None:
        """Start a sequence with these committed tokens in the lane; it has no pages yet."""
        state, params = self._state, sampler.params
        self._add(state.tokens, lane, 0, tokens)
        self._add(state.lengths, lane, 0, [len(tokens)])
        self._add(state.pages, lane, 0, np.full(state.pages.shape[1], state.scratch_page))
        self._add(state.top_k, lane, 0, [min(params.top_k, self._vocab_size)])
        inverse_temperature = 0.0 if sampler.greedy else 1.0 / params.temperature
        for tensor, value in (
            (state.inverse_temperature, inverse_temperature),
            (state.top_p, params.top_p),
            (state.min_p, params.min_p),
        ):
            self._add(tensor, lane, 0, np.array([value], dtype=np.float32).view(np.int32))
        seed = np.array([sampler.seed], dtype=np.uint64).view(np.int32)
        first = 2 * (int(state.seed.storage_offset()) + lane)  # in int32: a seed takes two
        self._pieces.append((first + np.arange(2), seed))

    def set_pages(self, lane: int, first: int, pages: Sequence[int]) -> None:
        """Write pages to a lane's table, from entry `first` on."""
        self._add(self._state.pages, lane, first, pages)

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """Return and forget all changes: indices int64 [n], each once, and values int32 [n]."""
        indices = np.concatenate([index for index, _ in self._pieces])
        values = np.concatenate([value for _, value in self._pieces])
        self._pieces = []
        unique, last = np.unique(indices[::-1], return_index=True)
        return unique, values[::-1][last]

    def _add(self, tensor: Tensor, lane: int, first: int, values: Sequence[int] | np.ndarray) -> None:
        width = tensor.shape[1] if tensor.dim() == 2 else 1
        assert first + len(values) <= width, f"{len(values)} values from {first} on in a lane of {width}"
        start = int(tensor.storage_offset()) + lane * width + first
        self._pieces.append((start + np.arange(len(values)), np.asarray(values, dtype=np.int32)))
