from __future__ import annotations

import random

import pytest

from paceline.bench.statistics import (
    MIN_UNITS,
    geometric_ratio,
    paired_ratio,
    student_quantile,
    summary,
    unpaired_ratio,
)


def test_a_summary() -> None:
    found = summary([float(i) for i in range(101)])
    assert found["mean"] == found["median"] == 50
    assert (found["p90"], found["p95"], found["p99"]) == (90, 95, 99)
    assert found["std"] == pytest.approx(29.1548, abs=1e-3)
    assert set(summary([]).values()) == {None}


def test_noise_that_hits_both_arms_cancels() -> None:
    """Units differ a hundredfold, the ratio does not: paired it is certain, unpaired it is not."""
    rng = random.Random(0)
    slow = [rng.uniform(1, 100) for _ in range(12)]
    fast = [seconds / 1.5 * rng.uniform(0.98, 1.02) for seconds in slow]
    paired = paired_ratio([(10, s) for s in fast], [(10, s) for s in slow])
    assert paired is not None
    assert paired.low is not None
    assert paired.high is not None
    assert 1.45 < paired.low < paired.value < paired.high < 1.55
    assert paired.verdict == "higher"
    loose = unpaired_ratio(slow, fast)
    assert loose is not None
    assert loose.low is not None
    assert loose.high is not None
    assert loose.high - loose.low > 5 * (paired.high - paired.low)


def test_the_ratio_is_that_of_sums() -> None:
    ratio = paired_ratio([(10, 1), (90, 9)], [(10, 2), (90, 9)])
    assert ratio is not None
    assert ratio.value == pytest.approx((100 / 10) / (100 / 11))


def test_too_few_units_have_no_interval() -> None:
    for units in range(1, MIN_UNITS + 1):
        ratio = paired_ratio([(2, 1)] * units, [(1, 1)] * units)
        assert ratio is not None
        assert (ratio.low is None) == (units < MIN_UNITS)
        assert ratio.verdict == ("unknown" if units < MIN_UNITS else "higher")


def test_an_interval_covers_what_it_says() -> None:
    """Of many repetitions with a known ratio of 1 about 95 in 100 have it in their interval."""
    rng, covered, times = random.Random(1), 0, 150
    for _ in range(times):
        mine, theirs = ([(rng.gauss(10, 1), 1.0) for _ in range(30)] for _ in range(2))
        ratio = paired_ratio(mine, theirs)
        assert ratio is not None
        covered += ratio.verdict == "same"
    assert 0.87 * times < covered < times


def test_nothing_to_compare() -> None:
    assert paired_ratio([], []) is None
    assert paired_ratio([(1, 0)], [(1, 1)]) is None
    assert unpaired_ratio([], [1.0]) is None
    with pytest.raises(ValueError, match="1 units against 2"):
        paired_ratio([(1, 1)], [(1, 1), (1, 1)])


def test_student_s_quantiles() -> None:
    """As tables have them, far out in the tails, too."""
    for probability, freedom, expected in (
        (0.975, 7, 2.3646),
        (0.9995, 3, 12.924),
        (0.975, 1, 12.706),
        (0.975, 60, 2.0),
    ):
        assert student_quantile(probability, freedom) == pytest.approx(expected, rel=1e-3)


def test_a_geometric_mean() -> None:
    found, corrected = (geometric_ratio([0.5, 2.0, 0.5, 2.0], comparisons=count) for count in (1, 100))
    assert found is not None
    assert corrected is not None
    assert found.value == pytest.approx(1.0)
    assert found.low is not None
    assert corrected.low is not None
    assert corrected.low < found.low < 0.5
    assert geometric_ratio([1.1, 1.2]) is not None
    assert geometric_ratio([]) is None
