"""Copies between the host and a device that do not wait for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

MAX_IN_FLIGHT = 4  # uploads of a table whose memory on the host is not used again yet


class TableUpload:
    """Rows of a table that the host writes often: int32 [lanes, width]. One copy carries all that have changed."""

    def __init__(self, lanes: int, width: int, device: torch.device) -> None:
        self._rows = np.zeros((lanes, width), dtype=np.int32)
        pinned = device.type == "cuda"
        self._memory = deque(
            torch.zeros((lanes, width), dtype=torch.int32, pin_memory=pinned) for _ in range(MAX_IN_FLIGHT)
        )
        self._changed: set[int] = set()

    def row(self, lane: int) -> np.ndarray:
        """Return the row of a lane to write to."""
        self._changed.add(lane)
        row: np.ndarray = self._rows[lane]
        return row

    def apply(self, table: Tensor) -> None:
        """Copy what has changed to the table, and the rows in between, without waiting."""
        if self._changed:
            rows = slice(min(self._changed), max(self._changed) + 1)
            self._changed.clear()
            self._memory.rotate()
            memory = self._memory[0][rows]
            memory.numpy()[:] = self._rows[rows]
            table[rows].copy_(memory, non_blocking=True)


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
