"""The sentence at the end of a report says what the interval allows, and no more."""

from __future__ import annotations

import pytest

from paceline.bench.conclusion import Outcome, conclusion
from paceline.bench.statistics import Ratio

LEAD = "Speculation makes m"


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (
            Outcome("", 2.1, (1.9, 2.3), 80, 80),
            "Speculation makes m 2.10 times as fast (1.90 to 2.30), same text in 80 of 80.",
        ),
        (Outcome("", 0.9, (0.85, 0.95)), "Speculation makes m slower: 0.90 times as fast (0.85 to 0.95)."),
        (
            Outcome("", 1.02, (0.98, 1.06), 5, 6),
            "No difference can be shown: speculation makes m 1.02 times as fast (0.98 to 1.06), same text in 5 of 6.",
        ),
        (
            Outcome("", 1.5, None),
            "Too few measurements for a conclusion: speculation makes m 1.50 times as fast, without an interval.",
        ),
        (Outcome("", None, None), "Nothing was measured that could be compared."),
        (
            Outcome("", 3.0, (2.9, 3.1), 4, 4, void=True),
            "No speed can be claimed: too many answers loop or repeat themselves, which is easy to guess, "
            "same text in 4 of 4.",
        ),
    ],
)
def test_one_case(outcome: Outcome, said: str) -> None:
    assert conclusion(LEAD, [outcome]) == said
    assert conclusion(LEAD, [outcome], interrupted=True) == f"Interrupted; so far: {said}"


def test_several_cases_are_counted() -> None:
    outcomes = [
        Outcome("a", 1.5, (1.4, 1.6), 5, 5),
        Outcome("b", 2.5, (2.4, 2.6), 4, 5),
        Outcome("c", 1.0, (0.9, 1.1)),
        Outcome("d", 0.5, (0.4, 0.6)),
    ]
    assert conclusion(LEAD, outcomes) == (
        "Speculation makes m faster in 2 of 4 cases (1.50 to 2.50 times as fast); slower in 1 of 4 cases (0.50 times "
        "as fast); neither faster nor slower, as far as can be shown, in 1 of 4 cases (1.00 times as fast), same text "
        "in 9 of 10."
    )


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.2), (0.8, 1.0), (1.01, 1.2), (0.8, 0.99), (None, None)])
def test_it_agrees_with_the_verdict_of_the_interval(low: float | None, high: float | None) -> None:
    ratio = Ratio(1.0, low, high, 9)
    outcome = Outcome("", ratio.value, None if low is None or high is None else (low, high))
    assert {"higher": "faster", "lower": "slower"}.get(ratio.verdict, ratio.verdict) == outcome.verdict
