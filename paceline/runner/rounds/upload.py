"""Copies between the host and a device that do not wait for it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.edit_reference import RowMasks

MAX_PATCH = 128  # changes that travel in one small copy
ALIGNED = 16  # bytes; kernels load this much at once from an address that is a multiple of it
MAX_IN_FLIGHT = 4  # uploads of masks whose memory on the host is not used again yet


class MaskTable:
    """The masks of rows of logits: written by the host, and read by the device, with one copy for each use.

    The host's memory of a copy is not used again before `MAX_IN_FLIGHT` others. The device's keeps its address."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self._rows = rows
        size, pinned = rows * (1 + -(-vocab_size // 32)), device.type == "cuda"
        self._memory = torch.zeros(size, dtype=torch.int32, device=device)
        self._host = deque(torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(MAX_IN_FLIGHT))
        self.masks = RowMasks(self._memory[:rows], self._memory[rows:].view(rows, -1))

    def write(self, masks: Mapping[int, np.ndarray]) -> RowMasks:
        """Set the masks of some rows, uint32 [words] each, and take those of all others, without waiting."""
        self._host.rotate()
        width = self.masks.words.shape[1]
        host, end = self._host[0].numpy(), self._rows + len(masks) * width
        which, words = host[: self._rows], host[self._rows : end].reshape(len(masks), width)
        which[:] = -1
        which[[*masks]] = range(len(masks))
        if masks:
            np.stack([*masks.values()], out=words.view(np.uint32))
        self._memory[:end].copy_(self._host[0][:end], non_blocking=True)
        return self.masks


class Patches:
    """Small sets of changes to a table int32 [n]: each travels in one copy, over memory that is made once."""

    def __init__(self, device: torch.device) -> None:
        shape = (MAX_IN_FLIGHT, 3 * MAX_PATCH)
        memory = torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._host = deque((each, *(part.numpy() for part in _divide(each))) for each in memory)
        self._device = torch.zeros(3 * MAX_PATCH, dtype=torch.int32, device=device)
        self._places, self._values = _divide(self._device)

    def apply(self, table: Tensor, changes: Mapping[int, int]) -> None:
        """Write values by index, without waiting; at least one, and at most MAX_PATCH of them."""
        self._host.rotate()
        memory, places, values = self._host[0]
        count = len(changes)
        places[:count], values[:count] = [*changes], [*changes.values()]
        places[count:], values[count:] = places[count - 1], values[count - 1]  # the last one again and again
        self._device.copy_(memory, non_blocking=True)
        table.scatter_(0, self._places, self._values)


def _divide(memory: Tensor) -> tuple[Tensor, Tensor]:
    """Divide the memory of changes into their places, int64, and their values, int32."""
    return memory[: 2 * MAX_PATCH].view(torch.int64), memory[2 * MAX_PATCH :]


class Upload:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, values: np.ndarray) -> Tensor:
        """Copy values to the device without waiting."""
        tensor = torch.from_numpy(values)
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)

    def together(self, *arrays: np.ndarray) -> list[Tensor]:
        """Copy arrays [n] to the device in one piece, without waiting."""
        starts = [0, *itertools.accumulate(-(-array.nbytes // ALIGNED) * ALIGNED for array in arrays)]
        memory = np.zeros(starts[-1], dtype=np.uint8)
        for start, array in zip(starts, arrays, strict=False):
            memory[start : start + array.nbytes] = array.view(np.uint8)
        whole, kinds = self(memory), [torch.from_numpy(array).dtype for array in arrays]
        ends = [start + array.nbytes for start, array in zip(starts, arrays, strict=False)]
        return [whole[start:end].view(kind) for start, end, kind in zip(starts, ends, kinds, strict=False)]

    def ints(self, values: Sequence[int]) -> Tensor:
        return self(np.array(values, dtype=np.int32))


def download(values: Tensor) -> Tensor:
    """Copy values to the host's memory without waiting: they are valid once the device has come so far."""
    memory = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    return memory.copy_(values, non_blocking=True)
