"""A cache of the teacher's hidden states over all exchanges, on the device, while there is memory for all of them.

    features   [tokens of all exchanges, features]     exchange i has rows [offsets[i], offsets[i + 1])
    hidden     [tokens of all exchanges, hidden]

The first epoch fills the cache. Cached states equal the teacher's up to rounding: they are those of the batch in which
the text was first seen. If float features do not fit, they are kept in 8 bits; if these do not fit either,
nothing is cached and every batch is computed again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.train.data.answers import Exchange
from paceline.train.data.batches import TextBatch
from paceline.train.data.teacher import TargetStates, Teacher

RESERVED_BYTES = 40 << 30  # GPU memory left for training itself
CPU_BYTES = 1 << 30  # on a CPU: the states of some 100,000 tokens of a target with 576 hidden dimensions
GROUP_FEATURES = 32  # features that share a scale, in 8 bits


def cache_bytes(device: torch.device) -> int:
    """Return the bytes that the cache may take."""
    return torch.cuda.mem_get_info(device)[0] - RESERVED_BYTES if device.type == "cuda" else CPU_BYTES


class StateCache:
    def __init__(self, teacher: Teacher, exchanges: Sequence[Exchange], *, max_bytes: int) -> None:
        self._teacher = teacher
        self._max_bytes = max_bytes
        lengths = np.array([len(exchange.tokens) for exchange in exchanges], dtype=np.int64)
        self._offsets = np.concatenate([[0], np.cumsum(lengths)])
        self._known = np.zeros(len(exchanges), dtype=bool)
        self._kept: tuple[FloatRows, FloatRows] | None = None  # features and hidden states

    def __call__(self, indices: Sequence[int], texts: TextBatch) -> TargetStates:
        """Return the states of a batch: `texts` are the exchanges with these indices."""
        if self._kept is not None and self._known[indices].all():
            return self._recall(indices, texts)
        states = self._teacher(texts.ids)
        self._keep(indices, texts, states)
        return states

    def _recall(self, indices: Sequence[int], texts: TextBatch) -> TargetStates:
        assert self._kept is not None
        rows = self._rows(indices, texts)
        features, hidden = (kept.at(rows) for kept in self._kept)
        return TargetStates(features=features, hidden=hidden)

    def _keep(self, indices: Sequence[int], texts: TextBatch, states: TargetStates) -> None:
        if self._kept is None:
            self._kept = self._allocate(states)
        if self._kept is None:
            return
        inside = torch.arange(texts.ids.shape[1], device=texts.ids.device) < texts.ends[:, None]
        rows = self._rows(indices, texts)[inside]
        for kept, new in zip(self._kept, (states.features, states.hidden), strict=True):
            kept.put(rows, new[inside])
        self._known[indices] = True

    def _rows(self, indices: Sequence[int], texts: TextBatch) -> Tensor:
        """Return the row of each token in the cache, [sequences, length]; padding has the row of the last token."""
        first = torch.from_numpy(self._offsets[indices]).to(texts.ids.device, non_blocking=True)
        at = torch.arange(texts.ids.shape[1], device=texts.ids.device)
        return first[:, None] + torch.minimum(at, texts.ends[:, None] - 1)

    def _allocate(self, like: TargetStates) -> tuple[FloatRows, FloatRows] | None:
        """Allocate features and hidden states of all exchanges; None if not even 8-bit features fit."""
        total, hidden = int(self._offsets[-1]), like.hidden.flatten(0, 1)
        for kind in (FloatRows, RoundedRows):
            if total * (kind.row_bytes(like.features) + FloatRows.row_bytes(hidden)) <= self._max_bytes:
                return kind(total, like.features.flatten(0, 1)), FloatRows(total, hidden)
        return None


class FloatRows:
    """Memory for `total` rows of the width, dtype and device of `some` [rows, width]."""

    def __init__(self, total: int, some: Tensor) -> None:
        self._rows = torch.empty((total, some.shape[-1]), dtype=some.dtype, device=some.device)

    @staticmethod
    def row_bytes(some: Tensor) -> int:
        return some.shape[-1] * some.element_size()

    def put(self, places: Tensor, rows: Tensor) -> None:
        self._rows[places] = rows

    def at(self, places: Tensor) -> Tensor:
        """Return the rows [..., width] at places [...]."""
        return self._rows[places]


class RoundedRows(FloatRows):
    """Memory for rows in 8 bits. Some columns are hundreds of times larger than others, so each column is divided by
    its mean magnitude first; the quotients have one scale per group of columns in a row."""

    def __init__(self, total: int, some: Tensor) -> None:
        self._dtype, width = some.dtype, some.shape[-1]
        self._magnitude = some.float().abs().mean(dim=0).clamp_min(1e-6)  # [width]
        self._values = torch.empty((total, width), dtype=torch.int8, device=some.device)
        self._scales = torch.empty((total, _groups(width)), dtype=torch.bfloat16, device=some.device)

    @staticmethod
    def row_bytes(some: Tensor) -> int:
        return some.shape[-1] + 2 * _groups(some.shape[-1])

    def put(self, places: Tensor, rows: Tensor) -> None:
        groups = (rows.float() / self._magnitude).view(len(rows), self._scales.shape[1], -1)
        # 126, not 127: bfloat16 may round a scale down by 0.4 %.
        scales = (groups.abs().amax(dim=-1) / 126).clamp_min(1e-20).to(torch.bfloat16)
        self._values[places] = (groups / scales[..., None]).round().to(torch.int8).view(rows.shape)
        self._scales[places] = scales

    def at(self, places: Tensor) -> Tensor:
        scales = self._scales[places].float()
        groups = self._values[places].view(*scales.shape, -1) * scales[..., None]
        return (groups.flatten(-2) * self._magnitude).to(self._dtype)


def _groups(width: int) -> int:
    """Number of groups in a row: GROUP_FEATURES columns each, or fewer if the width is no multiple of it."""
    return width // math.gcd(width, GROUP_FEATURES)
