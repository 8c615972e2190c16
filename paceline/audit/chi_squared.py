"""Chi-squared tests of counts against exact probabilities, and the smallest deviation that such a test finds.

A deviation is measured as *total variation*: the share of probability that is in the wrong place. By Cauchy and Schwarz
a shift of d has an effect of at least 2d in Cohen's measure; a test that finds every effect of 2d finds every shift of
d.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

MIN_EXPECTED = 5.0  # expected count of a bin; rarer bins are pooled


def pool(counts: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Counts and expectations [bins], with rare bins pooled into one."""
    rare = expected < MIN_EXPECTED
    if not bool(rare.any()):
        return counts, expected
    rest = torch.stack((counts[rare].sum(), expected[rare].sum()))
    return torch.cat((counts[~rare], rest[:1])), torch.cat((expected[~rare], rest[1:]))


def statistic(counts: Tensor, expected: Tensor) -> float:
    """Pearson's statistic; infinite for a count where none is possible."""
    if bool((counts[expected <= 0] > 0).any()):
        return math.inf
    there = expected > 0
    return float(((counts[there] - expected[there]) ** 2 / expected[there]).sum())


def p_value(statistic: float, freedom: int) -> float:
    """Probability of a statistic this large if the distribution is right."""
    if math.isinf(statistic):
        return 0.0
    return float(torch.special.gammaincc(_number(freedom / 2), _number(statistic / 2)))


def smallest_shift(samples: int, freedom: int, *, alarm: float, power: float) -> float:
    """Find the smallest total variation that a test of `samples` samples, which fails below the p-value `alarm`, finds
    with probability `power`."""
    limit = _solve(lambda x: p_value(x, freedom) < alarm, high=100.0 + 10.0 * freedom)
    effect = _solve(lambda x: _exceeds(limit, freedom, noncentrality=x) > power, high=400.0 + 10.0 * freedom)
    return min(1.0, math.sqrt(effect / samples) / 2)


def _exceeds(limit: float, freedom: int, *, noncentrality: float) -> float:
    """P(noncentral chi-squared > limit), as a mixture of central ones with Poisson weights."""
    half = noncentrality / 2
    most = int(half + 12 * math.sqrt(half + 1)) + 12
    steps = torch.arange(most, dtype=torch.float64)
    weights = torch.exp(steps * math.log(max(half, 1e-300)) - half - torch.lgamma(steps + 1))
    tails = torch.special.gammaincc(freedom / 2 + steps, torch.full_like(steps, limit / 2))
    return float((weights * tails).sum())


def _solve(passed: Callable[[float], bool], *, high: float) -> float:
    """Smallest x at which `passed` is true, to one part in a million."""
    low = 0.0
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if passed(middle) else (middle, high)
    return high


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)
