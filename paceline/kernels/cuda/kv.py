"""The KV memory of a CUDA device: two tensors [layers, pages + 1, kv_heads, PAGE_SIZE, head_dim].

A page of one head is contiguous, so that attention reads 16 keys at once. The page after the last is the scratch page:
no sequence has it, rows that only pad a batch write to it, and no real row reads it. Numbers are float32, bfloat16 or
float8_e4m3fn; float8 has no scale here, and saturates at ±448.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels.base import PAGE_SIZE
from paceline.kernels.kv_tensors import allocate, page_bytes
from paceline.kernels.quant import FP8, FP8_MAX


class CudaKV:
    """Implements KVMemory."""

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
        size = num_pages * page_bytes(layers, kv_heads, head_dim, dtype)
        self.keys, self.values = allocate(shape, num_pages=num_pages, size=size, dtype=dtype, device=device)

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


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert x to the dtype of a KV memory; float8 has no infinity and saturates."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(dtype) if dtype == FP8 else x.to(dtype)


def _places(slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return page and offset of each slot, int64."""
    wide = slots.long()
    return wide // PAGE_SIZE, wide % PAGE_SIZE


def _bits(x: Tensor) -> Tensor:
    """View float8 as bytes, other types as they are: torch cannot index float8 on every device."""
    return x.view(torch.uint8) if x.dtype == FP8 else x
