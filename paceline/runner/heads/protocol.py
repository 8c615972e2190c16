"""What a drafter asks of an EAGLE-3 head.

A pass is over rows as of any Forward, but row r pairs the hidden states of its position with the *next* token: its key
and value go to the slot of its position. With `features` the hidden states are the target's, [rows, 3 * hidden];
with `carry` row r goes on from what the pass before left at its row carry[r], in ascending order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.kernels.base import Batch, KVMemory, Output


class HeadForward(Protocol):
    ids: Tensor  # int32 [draft vocabulary]: the target's token of each output
    device: torch.device | str  # where features are wanted

    @property
    def kv(self) -> KVMemory: ...

    def __call__(self, batch: Batch, *, features: Tensor | None = None, carry: Sequence[int] = ()) -> Output:
        """Logits and argmax are of the draft vocabulary."""

    def pick(self, logits: Tensor, inverse_temperatures: Tensor, keys: Tensor) -> Tensor:
        """As of a Forward, with the noise of the target's tokens."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A draft that asks for nothing but the best tokens, or those that the noise of its batch and filters choose.
    Filters may be applied roughly: what they should have left out is rejected like any wrong guess."""

    limit: int  # tokens, at least 1
    worth: float  # a token is left out where the head believes less in it and all before it
    least: float  # nothing follows tokens of a level where it believes less in all of them together
    min_p: float = 0.0
    top_p: float = 1.0
    top_k: int = 0


@runtime_checkable
class TreeHead(HeadForward, Protocol):
    """A head that drafts several tokens without the host between them."""

    def draft(self, batch: Batch, features: Tensor, wanted: Sequence[Wanted], *, width: int) -> list[Tree]:
        """One draft a sequence of the batch, whose last row alone has logits; at most `width` tokens follow one. Drawn
        with the batch's seeds and inverse_temperatures."""


Tree = tuple[list[int], list[int]]  # tokens of the target's vocabulary, and their parents: see Draft
