"""Copies between the host and a device that do not wait for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


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
