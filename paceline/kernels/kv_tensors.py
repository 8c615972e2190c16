"""KV memory as two tensors, keys and values: its size, and its allocation with an error that says what to do."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.errors import OutOfMemory
from paceline.kernels.base import PAGE_SIZE


def page_bytes(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Count the bytes of one page: keys and values of all layers."""
    return 2 * layers * kv_heads * PAGE_SIZE * head_dim * dtype.itemsize


def allocate(
    shape: tuple[int, ...], *, num_pages: int, size: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Allocate keys and values of `shape`, as zeros. `num_pages` and `size`, in bytes, are for the error message."""
    try:
        return torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)
    except RuntimeError as error:
        raise OutOfMemory(
            f"no memory for a KV cache of {num_pages} pages ({size / 2**30:.1f} GiB) on {device}; "
            "ask for fewer pages or a shorter context"
        ) from error
