"""KV memory of the C kernels: bf16, in pairs whose products one instruction adds (docs/adr/0014).

[layers][pages][kv_heads] of { keys [head_dim / 2][PAGE_SIZE][2], values [PAGE_SIZE / 2][head_dim][2] }

So a vector of 16 pairs holds two dimensions of 16 keys, or 16 dimensions of the values of two keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_int32

import torch
from torch import Tensor

from paceline.errors import OutOfMemory
from paceline.kernels.base import PAGE_SIZE
from paceline.kernels.cpu.abi import Shape
from paceline.kernels.cpu.build import Library
from paceline.kernels.cpu.memory import Region


def page_bytes(*, layers: int, kv_heads: int, head_dim: int) -> int:
    """Count the bytes of one page over all layers."""
    return 2 * 2 * PAGE_SIZE * layers * kv_heads * head_dim


class CpuKV:
    """Implements KVMemory."""

    def __init__(self, library: Library, shape: Shape) -> None:
        """Allocate the memory and set `shape.kv`. The sizes in `shape` must not change afterwards."""
        size = shape.pages * page_bytes(layers=shape.layers, kv_heads=shape.kv_heads, head_dim=shape.head_dim)
        self.num_pages: int = shape.pages
        self._library = library
        self._shape = shape
        self._region = Region(
            size, what=f"a KV cache of {shape.pages} pages (ask for fewer pages or a shorter context)"
        )
        self.lend(shape)

    def lend(self, shape: Shape) -> None:
        """Let a program of this shape use the memory. It may have fewer layers: those of the program come first."""
        own = self._shape
        alike = (shape.pages, shape.kv_heads, shape.head_dim) == (own.pages, own.kv_heads, own.head_dim)
        assert alike, "a program whose keys and values lie elsewhere"
        assert shape.layers <= own.layers, f"{shape.layers} layers in memory for {own.layers}"
        shape.kv = self._region.address

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        count = len(source)
        assert count == len(target), f"{count} slots onto {len(target)}"
        self._check([*source, *target])
        slots = (c_int32 * (2 * count))(*source, *target)
        if self._library.paceline_kv_move(byref(self._shape), byref(slots), byref(slots, 4 * count), count):
            raise OutOfMemory(f"no memory to move {count} KV slots")

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        self._check(slots.tolist())
        wanted, shape = slots.to(torch.int32).contiguous(), self._shape
        keys = torch.empty((shape.layers, len(wanted), shape.kv_heads, shape.head_dim), dtype=torch.bfloat16)
        values = torch.empty_like(keys)
        arguments = (wanted.data_ptr(), len(wanted), keys.data_ptr(), values.data_ptr())
        self._library.paceline_kv_read(byref(shape), *arguments)
        return keys.float(), values.float()

    def _check(self, slots: Sequence[int]) -> None:
        limit = self.num_pages * PAGE_SIZE
        assert not slots or (min(slots) >= 0 and max(slots) < limit), f"slots beyond {limit}: {slots}"
