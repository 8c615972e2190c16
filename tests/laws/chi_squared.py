"""How likely counts are under an exact distribution."""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = 5.0  # expected counts below this are thrown together


def p_value(counts: Tensor, expected: Tensor) -> float:
    """Of Pearson's statistic for counts [cells] where `expected` [cells] were; 0 for a count where none can be."""
    if bool((counts[expected == 0] > 0).any()):
        return 0.0
    counts, expected = counts[expected > 0].double(), expected[expected > 0].double()
    rare = expected < LEAST
    if bool(rare.any()):
        counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
        expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor(float(len(counts) - 1), dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))
