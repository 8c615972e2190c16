"""Every operation of a decoder in plain torch: the oracle that faster kernels are tested against.

It runs on any device that torch supports, and computes one sequence after the other, so that it can be compared with
the definition of `Batch` line by line. It is not fast, and not bitwise: other rows of a batch may change how a row is
rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from paceline.kernels.base import PAGE_SIZE, Batch
from paceline.kernels.kv_tensors import allocate, page_bytes
from paceline.kernels.quant import Float8, Quantised, Weight, dequantise, float8_linear, quantised_linear


class ReferenceKV:
    """Implements KVMemory: keys and values are two tensors [layers, slots, kv_heads, head_dim]."""

    def __init__(
        self,
        *,
        layers: int,
        num_pages: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_pages = num_pages
        shape = (layers, num_pages * PAGE_SIZE, kv_heads, head_dim)
        size = num_pages * page_bytes(layers, kv_heads, head_dim, dtype)
        self.keys, self.values = allocate(shape, num_pages=num_pages, size=size, dtype=dtype, device=device)

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        for memory in (self.keys, self.values):
            memory[:, list(target)] = memory[:, list(source)]  # the right side is a copy, so overlaps are safe

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self.keys[:, slots.long()].float(), self.values[:, slots.long()].float()


@dataclass(frozen=True, slots=True)
class View:
    """The slots that the rows of one sequence attend to: first those that all share, then each row's own."""

    rows: slice
    shared: Tensor  # [length] slots of positions 0 … length - 1, from the page table
    own: Tensor | None  # [rows, depth] slots of the row's ancestors in a tree; unused entries point to the row itself
    distance: Tensor  # [rows, length + depth] positions back from the row to each slot; negative: not seen


class ReferenceBackend:
    """Implements Backend in plain torch."""

    def __init__(self, kv: ReferenceKV) -> None:
        self.kv = kv
        self._slots = torch.empty(0, dtype=torch.long)
        self._views: list[View] = []

    def begin(self, batch: Batch) -> None:
        self._slots = batch.slots.long()
        self._views = views_of(batch)

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.kv.keys[layer, self._slots] = keys.to(self.kv.keys.dtype)
        self.kv.values[layer, self._slots] = values.to(self.kv.values.dtype)

    def attend(self, layer: int, queries: Tensor, *, window: int, scale: float) -> Tensor:
        keys, values = self.kv.keys[layer], self.kv.values[layer]
        out = torch.empty_like(queries)
        for view in self._views:
            out[view.rows] = attend(queries[view.rows].float() * scale, keys, values, view, window).to(out.dtype)
        return out

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        return linear(x, weight, bias)


def attend(queries: Tensor, keys: Tensor, values: Tensor, view: View, window: int) -> Tensor:
    """Compute attention of one sequence's rows over the slots of their view, float32 [rows, heads, head_dim]."""
    q = queries.view(len(queries), keys.shape[1], -1, keys.shape[2])  # [rows, kv_heads, group, head_dim]
    scores = torch.einsum("rhgd,shd->rhgs", q, keys[view.shared].float())
    if view.own is not None:
        scores = torch.cat([scores, torch.einsum("rhgd,rthd->rhgt", q, keys[view.own].float())], dim=-1)
    hidden = (view.distance < 0) | (view.distance >= (window or 1 << 30))
    weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(dim=-1)
    length = len(view.shared)
    out = torch.einsum("rhgs,shd->rhgd", weights[..., :length], values[view.shared].float())
    if view.own is not None:
        out = out + torch.einsum("rhgt,rthd->rhgd", weights[..., length:], values[view.own].float())
    return out.flatten(1, 2)


def views_of(batch: Batch) -> list[View]:
    """Make the view of every sequence of a batch."""
    positions, bases = batch.positions.tolist(), batch.bases.tolist()
    views = []
    for sequence, (start, stop) in enumerate(pairwise(batch.row_starts.tolist())):
        length = max(positions[start:stop], default=-1) + 1
        if batch.tails is not None:
            length = min(length, bases[sequence])
        views.append(view_of(batch, sequence, slice(start, stop), length))
    return views


def view_of(batch: Batch, sequence: int, rows: slice, length: int) -> View:
    """Make the view of one sequence's rows, with the first `length` positions as shared slots."""
    row = batch.positions[rows, None]
    seen = torch.arange(length, device=row.device)
    shared = batch.page_table[sequence].long()[seen // PAGE_SIZE] * PAGE_SIZE + seen % PAGE_SIZE
    if batch.tails is None:
        return View(rows=rows, shared=shared, own=None, distance=row - seen)
    tails = batch.tails[rows].long()
    ahead = row - batch.bases[sequence] - torch.arange(tails.shape[1], device=row.device)  # [rows, depth]
    own = torch.where(ahead >= 0, tails, batch.slots[rows, None].long())
    return View(rows=rows, shared=shared, own=own, distance=torch.cat([row - seen, ahead], dim=1))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [rows, heads, head_dim] by angles with the cosines and sines [rows, head_dim / 2]."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    if isinstance(weight, Quantised):
        return quantised_linear(x, weight, bias).to(x.dtype)
    if isinstance(weight, Float8):
        return float8_linear(x, weight, bias).to(x.dtype)
    return functional.linear(x, weight, None if bias is None else bias.to(x.dtype))


def embed(tokens: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
    """Look up the rows of the embedding [vocab, hidden] for tokens [rows]."""
    index = tokens.long()
    if isinstance(weight, Tensor):
        return weight[index].to(dtype)
    return dequantise(weight.each(lambda part: part[index])).to(dtype)
