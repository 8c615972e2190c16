"""Every operation of a decoder in plain torch: the oracle that faster kernels are tested against.

Runs on any device torch knows. It is written to be read against the definition of `Batch`, one sequence after the
other; it is not fast, and its rows may round differently when other rows ride along.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from paceline.errors import OutOfMemory
from paceline.kernels.base import PAGE_SIZE, Batch
from paceline.kernels.quant import Quantised, dequantise, quantised_linear


class ReferenceKV:
    """Keys and values as two tensors [layers, slots, kv_heads, head_dim]."""

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
        try:
            self.keys = torch.zeros(shape, dtype=dtype, device=device)
            self.values = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            size = 2 * layers * num_pages * PAGE_SIZE * kv_heads * head_dim * dtype.itemsize / 2**30
            raise OutOfMemory(
                f"no memory for a KV cache of {num_pages} pages ({size:.1f} GiB) on {device}; "
                "ask for fewer pages or a shorter context"
            ) from error

    def move(self, source: Tensor, target: Tensor) -> None:
        for memory in (self.keys, self.values):
            memory[:, target.long()] = memory[:, source.long()]  # the right side is a copy, so overlaps are safe

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self.keys[:, slots.long()].float(), self.values[:, slots.long()].float()


class ReferenceBackend:
    """The `Backend` of plain torch."""

    def __init__(self, kv: ReferenceKV) -> None:
        self.kv = kv
        self._batch: Batch | None = None
        self._row_starts: list[int] = []
        self._lengths: list[int] = []

    def begin(self, batch: Batch) -> None:
        self._batch = batch
        self._row_starts = batch.row_starts.tolist()
        self._lengths = context_lengths(batch, self._row_starts)

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        slots = self._current().slots.long()
        self.kv.keys[layer, slots] = keys.to(self.kv.keys.dtype)
        self.kv.values[layer, slots] = values.to(self.kv.values.dtype)

    def attend(self, layer: int, queries: Tensor, *, window: int, scale: float) -> Tensor:
        batch = self._current()
        out = torch.empty_like(queries)
        for sequence, length in enumerate(self._lengths):
            rows = slice(self._row_starts[sequence], self._row_starts[sequence + 1])
            out[rows] = self._attend_one(batch, sequence, rows, length, queries[rows], layer, window, scale)
        return out

    def linear(self, x: Tensor, weight: Tensor | Quantised, bias: Tensor | None = None) -> Tensor:
        return linear(x, weight, bias)

    def _current(self) -> Batch:
        assert self._batch is not None, "begin(batch) comes before store and attend"
        return self._batch

    def _attend_one(
        self,
        batch: Batch,
        sequence: int,
        rows: slice,
        length: int,
        queries: Tensor,
        layer: int,
        window: int,
        scale: float,
    ) -> Tensor:
        keys, values = self.kv.keys[layer], self.kv.values[layer]
        q = queries.float().view(len(queries), keys.shape[1], -1, keys.shape[2])  # [rows, kv_heads, group, head_dim]
        shared = table_slots(batch.page_table[sequence], length)  # [length], the same for all rows
        scores = torch.einsum("rhgd,shd->rhgs", q, keys[shared].float())
        positions = batch.positions[rows, None]
        seen = torch.arange(length, device=queries.device)[None, :].expand(len(q), -1)  # positions behind the scores
        own = None
        if batch.tails is not None:
            own, ahead = tail_slots(batch, sequence, rows)  # [rows, depth]
            scores = torch.cat([scores, torch.einsum("rhgd,rthd->rhgt", q, keys[own].float())], dim=-1)
            seen = torch.cat([seen, ahead], dim=1)
        visible = (seen <= positions) & ((seen > positions - window) if window else True)
        weights = (scores * scale).masked_fill(~visible[:, None, None], float("-inf")).softmax(dim=-1)
        out = torch.einsum("rhgs,shd->rhgd", weights[..., :length], values[shared].float())
        if own is not None:
            out = out + torch.einsum("rhgt,rthd->rhgd", weights[..., length:], values[own].float())
        return out.flatten(1, 2).to(queries.dtype)


def context_lengths(batch: Batch, row_starts: list[int]) -> list[int]:
    """How many leading positions of each sequence are found through its page table."""
    positions = batch.positions.tolist()
    spans = pairwise(row_starts)
    lengths = [max(positions[start:stop], default=-1) + 1 for start, stop in spans]
    if batch.tails is None:
        return lengths
    return [min(pair) for pair in zip(lengths, batch.bases.tolist(), strict=True)]


def table_slots(pages: Tensor, length: int) -> Tensor:
    """Slots of positions 0 … length - 1."""
    position = torch.arange(length, device=pages.device)
    return pages.long()[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE


def tail_slots(batch: Batch, sequence: int, rows: slice) -> tuple[Tensor, Tensor]:
    """Slots of the ancestors of each row and their positions, both [rows, depth]; unused entries point to the row."""
    assert batch.tails is not None
    tails = batch.tails[rows].long()
    ahead = batch.bases[sequence] + torch.arange(tails.shape[1], device=tails.device)[None, :]
    used = ahead <= batch.positions[rows, None]
    return torch.where(used, tails, batch.slots[rows, None].long()), ahead.expand_as(tails)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [rows, heads, head_dim] by the angles whose cosines and sines are [rows, head_dim / 2]."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def linear(x: Tensor, weight: Tensor | Quantised, bias: Tensor | None = None) -> Tensor:
    if isinstance(weight, Quantised):
        return quantised_linear(x, weight, bias).to(x.dtype)
    return functional.linear(x, weight, None if bias is None else bias.to(x.dtype))


def embed(tokens: Tensor, weight: Tensor | Quantised, dtype: torch.dtype) -> Tensor:
    """Rows of the embedding [vocab, hidden] for tokens [rows]."""
    index = tokens.long()
    if not isinstance(weight, Quantised):
        return weight[index].to(dtype)
    rows = Quantised(weight.q[index], weight.scale[index], weight.minimum[index], weight.bits)
    return dequantise(rows).to(dtype)
