"""What the teacher thinks of each exchange, computed once and kept on the device while there is memory for all of it.

    features   [tokens of all exchanges, features]     exchange i lies at [offsets[i], offsets[i + 1])
    hidden     [tokens of all exchanges, hidden]

The first epoch fills it. What comes out is what a teacher would say, but for rounding: a text's insight is that of the
batch it was first seen in. Where it does not fit, features are kept in 8 bits; where that does not fit either, every
batch is computed anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.train.data.answers import Exchange
from paceline.train.data.batches import Texts
from paceline.train.students.teacher import Insight, Teacher

SPARE = 40 << 30  # bytes of a GPU that training itself may need
GROUP = 32  # features with one scale, in 8 bits


def room(device: torch.device) -> int:
    """Bytes that insights may take. On a CPU none: toys are computed as fast as they are looked up."""
    return torch.cuda.mem_get_info(device)[0] - SPARE if device.type == "cuda" else 0


class Insights:
    def __init__(self, teacher: Teacher, exchanges: Sequence[Exchange], *, room: int) -> None:
        self._teacher = teacher
        self._room = room
        lengths = np.array([len(exchange.tokens) for exchange in exchanges], dtype=np.int64)
        self._offsets = np.concatenate([[0], np.cumsum(lengths)])
        self._known = np.zeros(len(exchanges), dtype=bool)
        self._kept: tuple[Rows, Rows] | None = None

    def __call__(self, indices: Sequence[int], texts: Texts) -> Insight:
        if self._kept is not None and self._known[indices].all():
            return self._recall(indices, texts)
        insight = self._teacher(texts.ids)
        self._keep(indices, texts, insight)
        return insight

    def _recall(self, indices: Sequence[int], texts: Texts) -> Insight:
        assert self._kept is not None
        rows = self._rows(indices, texts)
        features, hidden = (kept.at(rows) for kept in self._kept)
        return Insight(features=features, hidden=hidden)

    def _keep(self, indices: Sequence[int], texts: Texts, insight: Insight) -> None:
        if self._kept is None:
            self._kept = self._memory(insight)
        if self._kept is None:
            return
        inside = torch.arange(texts.ids.shape[1], device=texts.ids.device) < texts.ends[:, None]
        rows = self._rows(indices, texts)[inside]
        for kept, new in zip(self._kept, (insight.features, insight.hidden), strict=True):
            kept.put(rows, new[inside])
        self._known[indices] = True

    def _rows(self, indices: Sequence[int], texts: Texts) -> Tensor:
        """[sequences, length] where each token's insight lies; padding has that of the last token."""
        first = torch.from_numpy(self._offsets[indices]).to(texts.ids.device, non_blocking=True)
        at = torch.arange(texts.ids.shape[1], device=texts.ids.device)
        return first[:, None] + torch.minimum(at, texts.ends[:, None] - 1)

    def _memory(self, like: Insight) -> tuple[Rows, Rows] | None:
        total, hidden = int(self._offsets[-1]), like.hidden.flatten(0, 1)
        for kind in (Rows, RoundedRows):
            if total * (kind.width(like.features) + Rows.width(hidden)) <= self._room:
                return kind(total, like.features.flatten(0, 1)), Rows(total, hidden)
        return None


class Rows:
    """Memory for `total` rows like those of `some` [rows, width]."""

    def __init__(self, total: int, some: Tensor) -> None:
        self._rows = torch.empty((total, some.shape[-1]), dtype=some.dtype, device=some.device)

    @staticmethod
    def width(some: Tensor) -> int:
        """Bytes of one."""
        return some.shape[-1] * some.element_size()

    def put(self, places: Tensor, rows: Tensor) -> None:
        self._rows[places] = rows

    def at(self, places: Tensor) -> Tensor:
        """[..., width] for places [...]"""
        return self._rows[places]


class RoundedRows(Rows):
    """The same in 8 bits: some columns are hundreds of times larger than others, so each is first divided by its own
    size, and what is left has a scale for every few columns of a row."""

    def __init__(self, total: int, some: Tensor) -> None:
        self._dtype, width = some.dtype, some.shape[-1]
        self._size = some.float().abs().mean(dim=0).clamp_min(1e-6)
        self._whole = torch.empty((total, width), dtype=torch.int8, device=some.device)
        self._scales = torch.empty((total, _groups(width)), dtype=torch.bfloat16, device=some.device)

    @staticmethod
    def width(some: Tensor) -> int:
        return some.shape[-1] + 2 * _groups(some.shape[-1])

    def put(self, places: Tensor, rows: Tensor) -> None:
        parts = (rows.float() / self._size).view(len(rows), self._scales.shape[1], -1)
        scales = (parts.abs().amax(dim=-1) / 126).clamp_min(1e-20).to(torch.bfloat16)  # which may round down by 0.4 %
        self._whole[places] = (parts / scales[..., None]).round().to(torch.int8).view(rows.shape)
        self._scales[places] = scales

    def at(self, places: Tensor) -> Tensor:
        scales = self._scales[places].float()
        parts = self._whole[places].view(*scales.shape, -1) * scales[..., None]
        return (parts.flatten(-2) * self._size).to(self._dtype)


def _groups(width: int) -> int:
    return width // math.gcd(width, GROUP)
