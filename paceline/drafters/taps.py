"""Taps: the columns of a drafter in hidden states that are kept for several."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def columns(wanted: Sequence[int], kept: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Return a function that selects the columns of the `wanted` taps from features of all `kept` taps."""
    if list(wanted) == list(kept):
        return lambda features: features
    places = [kept.index(tap) for tap in wanted]
    return lambda features: torch.cat([features.chunk(len(kept), dim=1)[place] for place in places], dim=1)
