"""What the teacher thinks of each exchange, computed once and kept on the device while there is memory for all of it.

    features   [tokens of all exchanges, features]     exchange i lies at [offsets[i], offsets[i + 1])
    hidden     [tokens of all exchanges, hidden]

The first epoch fills it. Where it does not fit, every batch is computed anew; what comes out is the same but for
rounding: a text's insight is that of the batch it was first seen in.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.train.answers import Exchange
from paceline.train.batches import Texts
from paceline.train.teacher import Insight, Teacher

SPARE = 40 << 30  # bytes of a GPU that training itself may need


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
        self._kept: tuple[Tensor, Tensor] | None = None

    def __call__(self, indices: Sequence[int], texts: Texts) -> Insight:
        if self._kept is not None and self._known[indices].all():
            return self._recall(indices, texts)
        insight = self._teacher(texts.ids)
        self._keep(indices, texts, insight)
        return insight

    def _recall(self, indices: Sequence[int], texts: Texts) -> Insight:
        assert self._kept is not None
        rows = self._rows(indices, texts)
        features, hidden = (kept[rows] for kept in self._kept)
        return Insight(features=features, hidden=hidden)

    def _keep(self, indices: Sequence[int], texts: Texts, insight: Insight) -> None:
        if self._kept is None:
            self._kept = self._memory(insight)
        if self._kept is None:
            return
        inside = torch.arange(texts.ids.shape[1], device=texts.ids.device) < texts.ends[:, None]
        rows = self._rows(indices, texts)[inside]
        for kept, new in zip(self._kept, (insight.features, insight.hidden), strict=True):
            kept[rows] = new[inside]
        self._known[indices] = True

    def _rows(self, indices: Sequence[int], texts: Texts) -> Tensor:
        """[sequences, length] where each token's insight lies; padding has that of the last token."""
        first = torch.from_numpy(self._offsets[indices]).to(texts.ids.device, non_blocking=True)
        at = torch.arange(texts.ids.shape[1], device=texts.ids.device)
        return first[:, None] + torch.minimum(at, texts.ends[:, None] - 1)

    def _memory(self, like: Insight) -> tuple[Tensor, Tensor] | None:
        total = int(self._offsets[-1])
        parts = (like.features, like.hidden)
        if sum(total * part.shape[-1] * part.element_size() for part in parts) > self._room:
            return None
        features, hidden = (
            torch.empty((total, part.shape[-1]), dtype=part.dtype, device=part.device) for part in parts
        )
        return features, hidden
