"""The choice of DFlash2 among the best tokens of each row, by the token before.

    score(b after a) = logit(b) + ⟨before[a] · (P h), after[b]⟩     for the best tokens b of the row

All other tokens come after these: their logits are lowered by BEHIND.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.kernels.quant import Weight
from paceline.kernels.reference import embed, linear
from paceline.models.block_config import Selector

BEHIND = 1e4  # logits; finite, so that a token is left where a grammar forbids all of the best


class SelectedRows:
    """Implements BlockRows for a drafter with this choice."""

    def __init__(
        self, config: Selector, weights: Mapping[str, Weight], states: Tensor, logits: Tensor, ids: Tensor
    ) -> None:
        """`states` [rows, hidden] after the last norm, `logits` [rows, draft vocabulary], `ids`: the target's token of
        each output."""
        self._weights = weights
        self._logits = logits
        self._best = logits.topk(config.top, dim=-1)
        self._tokens = ids[self._best.indices].to(states.device)  # [rows, top]
        self._factors = linear(states, weights["selector.states"])  # [rows, rank]

    def logits(self, row: int, before: int) -> Tensor:
        factors = self._factors[row]
        token = torch.tensor([before], device=factors.device)
        left = embed(token, self._weights["selector.before"], factors.dtype)[0] * factors
        right = embed(self._tokens[row], self._weights["selector.after"], factors.dtype)  # [top, rank]
        edges = self._best.values[row] + (right @ left).float().cpu()  # [top]
        scores = self._logits[row : row + 1] - BEHIND
        scores[0, self._best.indices[row]] = edges
        self._chosen = int(self._best.indices[row, edges.argmax()])
        return scores

    def best(self, row: int) -> int:
        return self._chosen

    def confidence(self, row: int, before: int) -> float | None:
        return None
