"""Attention of blocks: each row sees the context of its sequence in pages, and rows of its own block.

    slots   pages of the context ......................... │ scratch
    row i   positions 0 … p - 1, at most a window back     │ the rows of its block, at p … p + B - 1

Keys and values of a block are in the scratch slots while its rows attend, and are lost after that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels.base import PAGE_SIZE, Batch
from paceline.kernels.quant import Weight
from paceline.kernels.reference import ReferenceKV, View, attend, linear
from paceline.runner.heads.protocol import Anchor


class BlockBackend:
    """Implements Backend for the rows of blocks, all of `rows` rows: keys and values are not kept."""

    def __init__(self, kv: ReferenceKV, *, scratch: Tensor, causal: Sequence[bool]) -> None:
        """`scratch`: slots for the rows of one block. `causal`: the layers whose rows see no later row."""
        self.kv = kv
        self._scratch = scratch
        self._causal = causal
        self._views: dict[bool, list[View]] = {}
        self._keys = self._values = torch.empty(0)

    def begin(self, batch: Batch) -> None:
        raise AssertionError("blocks are begun with their anchors")

    def begin_blocks(self, anchors: Sequence[Anchor], rows: int) -> None:
        """Prepare for a pass over one block after each anchor, once for all layers."""
        self._views = {
            kind: [self._view(i, each, rows, kind) for i, each in enumerate(anchors)] for kind in {*self._causal}
        }

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values = keys.to(self.kv.keys.dtype), values.to(self.kv.values.dtype)

    def attend(self, layer: int, queries: Tensor, *, window: int, scale: float) -> Tensor:
        keys, values = self.kv.keys[layer], self.kv.values[layer]
        out = torch.empty_like(queries)
        for view in self._views[self._causal[layer]]:
            used = self._scratch[: view.rows.stop - view.rows.start]
            keys[used], values[used] = self._keys[view.rows], self._values[view.rows]
            out[view.rows] = attend(queries[view.rows].float() * scale, keys, values, view, window).to(out.dtype)
        return out

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        return linear(x, weight, bias)

    def _view(self, block: int, anchor: Anchor, rows: int, causal: bool) -> View:
        device = self._scratch.device
        at, before = torch.arange(rows, device=device), torch.arange(anchor.position, device=device)
        pages = torch.tensor([*anchor.pages], dtype=torch.long, device=device)
        inside = at[:, None] - at  # positions back to each row of the block; negative: a later one
        return View(
            rows=slice(block * rows, (block + 1) * rows),
            shared=pages[before // PAGE_SIZE] * PAGE_SIZE + before % PAGE_SIZE,
            own=self._scratch[:rows].expand(rows, rows),
            distance=torch.cat([anchor.position + at[:, None] - before, inside if causal else inside.abs()], dim=1),
        )
