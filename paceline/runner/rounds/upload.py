"""Copies between the host and a device that do not wait for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.edit_reference import RowMasks
from paceline.runner.rounds.alignment import BYTES, aligned, places
from paceline.sampling.words import MaskSheet, mask_words

MAX_PATCH = 128  # changes that travel in one small copy
MAX_IN_FLIGHT = 4  # uploads of changes whose memory on the host is not used again yet


class MaskTable:
    """The masks of rows of logits, in memory of the host that the device reads itself: nothing is copied.

    Its address is fixed, so that it can be part of a graph, and there is one sheet: it may be asked for once the draw
    with its last masks has ended."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device, *, masks: int | None = None) -> None:
        """`masks`: number of masks that the sheet has room for; None: as many as rows."""
        shape, begin = (masks or rows, mask_words(vocab_size)), aligned(rows)
        memory = torch.zeros(begin + shape[0] * shape[1], dtype=torch.int32, pin_memory=device.type == "cuda")
        self.masks = RowMasks(memory[:rows], memory[begin:].view(shape))
        self._sheet = MaskSheet(self.masks.which.numpy(), self.masks.words.numpy().view(np.uint32))

    def sheet(self) -> MaskSheet:
        """Return the sheet, empty."""
        self._sheet.clear()
        return self._sheet


class MaskTables:
    """Tables of masks by size: rounds of similar size share one, because they run one after the other."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._tables: dict[tuple[int, int], MaskTable] = {}  # by numbers of rows and of masks

    def of(self, rows: int, *, tree: bool) -> MaskTable:
        """Return a table for at least so many rows. Those of a tree may be there twice."""
        size = 1 << (rows - 1).bit_length()
        masks = 2 * size if tree else size
        if (size, masks) not in self._tables:
            self._tables[size, masks] = MaskTable(size, self._vocab_size, self._device, masks=masks)
        return self._tables[size, masks]


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
        tensor = pinned(values) if self._device.type == "cuda" else torch.from_numpy(values)
        return tensor.to(self._device, non_blocking=True)

    def together(self, *arrays: np.ndarray) -> list[Tensor]:
        """Copy arrays [n] to the device in one piece, without waiting."""
        where, total = places([array.nbytes for array in arrays], BYTES)
        memory = np.zeros(total, dtype=np.uint8)
        for place, array in zip(where, arrays, strict=True):
            memory[place] = array.view(np.uint8)
        whole, kinds = self(memory), [torch.from_numpy(array).dtype for array in arrays]
        return [whole[place].view(kind) for place, kind in zip(where, kinds, strict=True)]

    def ints(self, values: Sequence[int]) -> Tensor:
        return self(np.array(values, dtype=np.int32))

    def masks(self, sheet: MaskSheet) -> RowMasks:
        sheet.settle()
        return RowMasks(self(sheet.which), self(sheet.words.view(np.int32)))


def pinned(values: np.ndarray) -> Tensor:
    """Copy values to memory of the host that a device can reach. By numpy: torch shares a copy of more than 32,768
    elements among threads, and to wake them took up to 20 ms where a processor was slow to come back."""
    memory = torch.empty(values.shape, dtype=torch.from_numpy(values).dtype, pin_memory=True)
    np.copyto(memory.numpy(), values)
    return memory


def download(values: Tensor) -> Tensor:
    """Copy values to the host's memory without waiting: they are valid once the device has come so far."""
    memory = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.device.type == "cuda")
    return memory.copy_(values, non_blocking=True)


def first_masks(masks: Sequence[np.ndarray | None], upload: Upload, *, vocab_size: int) -> RowMasks | None:
    """Copy the masks of the first tokens after prompts to a device; None: there are none."""
    if all(mask is None for mask in masks):
        return None
    sheet = MaskSheet.empty(len(masks), len(masks), vocab_size)
    sheet.put(range(len(masks)), masks)
    return upload.masks(sheet)
