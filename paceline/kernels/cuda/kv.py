"""The KV memory of a CUDA device: two tensors [layers, pages + 1, kv_heads, PAGE_SIZE, head_dim].

A page of one head is contiguous, so that attention reads 16 keys at a stretch. The page after the last belongs to no
sequence: rows that only pad a batch write there, and what it holds is never read for a real row. Values are kept in
float32, bfloat16 or float8_e4m3fn; the latter without a scale: what exceeds ±448 is stored as ±448.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.errors import OutOfMemory
from paceline.kernels.base import PAGE_SIZE

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


class CudaKV:
    """A `KVMemory` in pages."""

    def __init__(
        self,
        *,
        layers: int,
        num_pages: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cuda",
    ) -> None:
        self.num_pages = num_pages
        self.scratch_page = num_pages
        shape = (layers, num_pages + 1, kv_heads, PAGE_SIZE, head_dim)
        try:
            self.keys = torch.zeros(shape, dtype=dtype, device=device)
            self.values = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            size = num_pages * page_bytes(layers, kv_heads, head_dim, dtype) / 2**30
            raise OutOfMemory(
                f"no memory for a KV cache of {num_pages} pages ({size:.1f} GiB) on {device}; "
                "ask for fewer pages or a shorter context"
            ) from error

    def store(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [n, kv_heads, head_dim] to slots [n] of a layer."""
        page, offset = _places(slots)
        for memory, new in ((self.keys, keys), (self.values, values)):
            _bits(memory)[layer, page, :, offset] = _bits(narrow(new, memory.dtype))

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        source_page, source_offset = _places(torch.tensor(source, device=self.keys.device))
        target_page, target_offset = _places(torch.tensor(target, device=self.keys.device))
        for memory in (_bits(self.keys), _bits(self.values)):
            copy = memory[:, source_page, :, source_offset]  # [n, layers, kv_heads, head_dim]; overlaps are safe
            memory[:, target_page, :, target_offset] = copy

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        page, offset = _places(slots)
        keys, values = (
            _bits(memory)[:, page, :, offset].view(memory.dtype).transpose(0, 1).float()
            for memory in (self.keys, self.values)
        )
        return keys, values


def page_bytes(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """What one page takes, keys and values of all layers."""
    return 2 * layers * kv_heads * PAGE_SIZE * head_dim * dtype.itemsize


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in the dtype of a KV memory; float8 knows no infinity, so it saturates."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(dtype) if dtype == FP8 else x.to(dtype)


def _places(slots: Tensor) -> tuple[Tensor, Tensor]:
    wide = slots.long()
    return wide // PAGE_SIZE, wide % PAGE_SIZE


def _bits(x: Tensor) -> Tensor:
    """The same memory as bytes where it is float8: torch does not index every type of one byte everywhere."""
    return x.view(torch.uint8) if x.dtype == FP8 else x
