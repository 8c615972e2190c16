"""Summaries of samples, and ratios of two arms with bootstrap intervals.

An arm is one way to do the same work. Arms that took turns are compared unit by unit (a prompt, a batch, a block of
requests), and the bootstrap draws units. Noise that lasts longer than a unit affects both arms and cancels. An interval
covers 95 of 100 repetitions on the same machine with other units of the same kind, not other machines. Everything here
is deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

PERCENTILES = (90, 95, 99)
RESAMPLES, SEED, COVERED_PERCENT = 4000, 0, 95  # parameters of the bootstrap
MIN_UNITS = 4  # units that an interval needs


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure of one arm divided by that of another. It has no bounds if there were too few units."""

    value: float
    low: float | None
    high: float | None
    units: int

    @property
    def verdict(self) -> str:
        """`higher` or `lower` if the whole interval is above or below 1, else `same`; `unknown` without an interval."""
        if self.low is None or self.high is None:
            return "unknown"
        return "higher" if self.low > 1 else "lower" if self.high < 1 else "same"

    def record(self) -> dict[str, Any]:
        interval = None if self.low is None else [self.low, self.high]
        return {"ratio": self.value, "interval": interval, "units": self.units, "verdict": self.verdict}


def summary(values: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, std and percentiles; None for each if there are no values."""
    names = ("mean", "median", "std", *(f"p{p}" for p in PERCENTILES))
    if not values:
        return dict.fromkeys(names)
    array = np.asarray(values, dtype=np.float64)
    found = (array.mean(), np.median(array), array.std(), *np.percentile(array, PERCENTILES))
    return dict(zip(names, map(float, found), strict=True))


def paired_ratio(mine: Sequence[tuple[float, float]], theirs: Sequence[tuple[float, float]]) -> Ratio | None:
    """The ratio of (Σ amount / Σ weight) of two arms; each unit is (amount, weight) in both.

    A speed is (tokens, seconds), a mean is (value, 1). None if a sum is 0.
    """
    if len(mine) != len(theirs):
        raise ValueError(f"{len(mine)} units against {len(theirs)}: pairs need as many of each")
    units = np.asarray([(*a, *b) for a, b in zip(mine, theirs, strict=True)], dtype=np.float64)  # [units, 4]
    if not len(units) or not units.sum(axis=0).all():
        return None
    drawn = _resampled(len(units))  # [resamples, units]
    return _ratio(units.sum(axis=0), units[drawn].sum(axis=1), len(units))


def unpaired_ratio(mine: Sequence[float], theirs: Sequence[float]) -> Ratio | None:
    """The ratio of two means, for samples without pairs."""
    if not mine or not theirs or not sum(mine) or not sum(theirs):
        return None
    a, b = np.asarray(mine, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    few = min(len(a), len(b))
    means = [x[_resampled(len(x), seed=SEED + i)].mean(axis=1) for i, x in enumerate((a, b))]  # 2 × [resamples]
    low, high = _bounds(means[0] / means[1]) if few >= MIN_UNITS else (None, None)
    return Ratio(float(a.mean() / b.mean()), low, high, few)


def geometric_ratio(ratios: Sequence[float], *, comparisons: int = 1) -> Ratio | None:
    """The geometric mean of one ratio for each round, with a Student interval of their logarithms; None without any.

    The interval is one of `comparisons` that cover together what a single one would: Bonferroni's correction. The
    bootstrap has no values so far out in its tails."""
    if not ratios:
        return None
    logs, units = np.log(np.asarray(ratios, dtype=np.float64)), len(ratios)
    value = float(np.exp(logs.mean()))
    if units < MIN_UNITS:
        return Ratio(value, None, None, units)
    tail = (1 - COVERED_PERCENT / 100) / (2 * comparisons)
    half = student_quantile(1 - tail, units - 1) * float(logs.std(ddof=1)) / units**0.5
    return Ratio(value, value / float(np.exp(half)), value * float(np.exp(half)), units)


@cache
def student_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's distribution. With t = √freedom · tan θ its density is cos^(freedom - 1) θ, which is
    summed over a fine grid of angles."""
    angles = np.linspace(-np.pi / 2, np.pi / 2, 400_001)
    density = np.cos((angles[1:] + angles[:-1]) / 2) ** (freedom - 1)
    below = np.concatenate(([0.0], density.cumsum() / density.sum()))  # probability of smaller angles
    return float(freedom**0.5 * np.tan(np.interp(probability, below, angles)))


def _resampled(units: int, *, seed: int = SEED) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Indices of the units of each resample [resamples, units]."""
    return np.random.default_rng(seed).integers(0, units, size=(RESAMPLES, units))


def _ratio(whole: np.ndarray[Any, Any], sums: np.ndarray[Any, Any], units: int) -> Ratio:
    value = (whole[0] / whole[1]) / (whole[2] / whole[3])
    if units < MIN_UNITS:
        return Ratio(float(value), None, None, units)
    with np.errstate(divide="ignore", invalid="ignore"):  # a resample of empty units alone
        ratios = (sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3])
    low, high = _bounds(ratios[np.isfinite(ratios)])
    return Ratio(float(value), low, high, units)


def _bounds(ratios: np.ndarray[Any, Any]) -> tuple[float, float]:
    tail = (100 - COVERED_PERCENT) / 2
    low, high = np.percentile(ratios, (tail, 100 - tail))
    return float(low), float(high)
