"""Copies between the host and a device that do not wait for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.edit_reference import RowMasks
from paceline.sampling.words import MaskSheet, mask_words

MAX_PATCH = 128  # changes that travel in one small copy
ALIGNED = 4  # numbers: masks begin at a multiple, because kernels are compiled for aligned memory
MAX_IN_FLIGHT = 4  # uploads of masks whose memory on the host is not used again yet


class MaskTable:
    """The masks of rows of logits: written by the host to a sheet, and read by the device, with one copy for each use.

    The host's memory of a copy is not used again before `MAX_IN_FLIGHT` others. The device's keeps its address."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device, *, masks: int | None = None) -> None:
        """`masks`: number of masks that a sheet has room for; None: as many as rows."""
        shape = rows if masks is None else masks, mask_words(vocab_size)
        self._rows, self._begin = rows, -(-rows // ALIGNED) * ALIGNED
        size, pinned = self._begin + shape[0] * shape[1], device.type == "cuda"
        self._memory = torch.zeros(size, dtype=torch.int32, device=device)
        self.masks = RowMasks(self._memory[:rows], self._memory[self._begin :].view(shape))
        pieces = [torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(MAX_IN_FLIGHT)]
        self._host = deque((piece, self._sheet_over(piece.numpy(), shape)) for piece in pieces)

    def sheet(self) -> MaskSheet:
        """Return an empty sheet."""
        self._host.rotate()
        sheet = self._host[0][1]
        sheet.clear()
        return sheet

    def send(self, sheet: MaskSheet) -> RowMasks:
        """Set the masks of a sheet, and take those of all rows that are not on it, without waiting."""
        sheet.settle()
        end = self._begin + sheet.used * self.masks.words.shape[1]
        piece = next(piece for piece, own in self._host if own is sheet)
        self._memory[:end].copy_(piece[:end], non_blocking=True)
        return self.masks

    def _sheet_over(self, memory: np.ndarray, shape: tuple[int, int]) -> MaskSheet:
        return MaskSheet(memory[: self._rows], memory[self._begin :].reshape(shape).view(np.uint32))


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

    def ints(self, values: Sequence[int]) -> Tensor:
        return self(np.array(values, dtype=np.int32))


def download(values: Tensor) -> Tensor:
    """Copy values to the host's memory without waiting: they are valid once the device has come so far."""
    memory = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    return memory.copy_(values, non_blocking=True)
