"""Drafts on paper have the lengths and the acceptance that were measured, recorded or given."""

from __future__ import annotations

import random

import pytest

from paceline.errors import InvalidRequest
from paceline.replay.drafts import (
    Drafts,
    MeasuredDrafts,
    Round,
    given_acceptance,
    recorded_acceptance,
)
from tests.replay.recorded import arrival

DRAWS = 4000


def mean_accepted(drafts: Drafts, number: int = 1, *, limit: int = 16) -> float:
    rng, one = random.Random(0), arrival(number)
    return sum(drafts.draw(one, batch=1, limit=limit, rng=rng).accepted for _ in range(DRAWS)) / DRAWS


def test_a_limit_cuts_a_round() -> None:
    tree = Round(tokens=10, depth=4, passes=4, accepted=3)
    assert tree.within(10) == tree
    assert tree.within(6) == Round(6, 4, 4, 3)
    assert tree.within(2) == Round(2, 2, 2, 2)


def test_given_acceptance_is_that_of_each_token() -> None:
    drafts = given_acceptance(0.5, max_draft=4)
    assert mean_accepted(drafts) == pytest.approx(0.5 + 0.25 + 0.125 + 0.0625, rel=0.05)
    assert mean_accepted(drafts, limit=1) == pytest.approx(0.5, rel=0.05)
    assert "given: 0.5" in drafts.source
    assert mean_accepted(given_acceptance(1.0, max_draft=3)) == 3
    assert mean_accepted(given_acceptance(0.0, max_draft=3)) == 0


def test_recorded_acceptance_is_that_of_each_request() -> None:
    stats = {"steps": 40, "rounds": 20, "drafted": 80, "drafter": "prediction+ngram"}
    good = arrival(1, **stats, accepted_by_position=[20, 20, 20, 20])
    bad = arrival(2, **stats, accepted_by_position=[0])
    few = arrival(3, steps=2, rounds=2, drafted=8, drafter="ngram", accepted_by_position=[2])
    drafts = recorded_acceptance([good, bad, few], drafter="ngram")
    assert mean_accepted(drafts, 1) == pytest.approx(2.0, rel=0.1)  # 4 right in each of the half that drafts
    assert mean_accepted(drafts, 2) == 0
    everybody = (20 + 2 + 3 * 20) / 42 * (42 / 82)  # too few rounds of its own: as all requests together
    assert mean_accepted(drafts, 3) == pytest.approx(everybody, rel=0.1)
    assert drafts.source == "recorded: 42 rounds of 3 requests"
    with pytest.raises(InvalidRequest, match=r"no drafts of 'suffix'.*--acceptance"):
        recorded_acceptance([good], drafter="suffix")


def test_measured_rounds_are_drawn_for_the_request_that_is_most_alike() -> None:
    good, bad, like_bad, unknown = (
        arrival(1, output=8, steps=2),
        arrival(2, output=8, steps=8),
        arrival(3, output=8, steps=7),
        arrival(4),
    )
    rounds = {1: {1: [Round(4, 4, 4, 4)], 8: [Round(2, 2, 2, 2)]}, 2: {1: [Round(4, 4, 4, 0)], 3: []}}
    drafts = MeasuredDrafts(rounds, [good, bad, like_bad, unknown])
    assert [mean_accepted(drafts, number) for number in (1, 2, 3)] == [4, 0, 0]
    assert mean_accepted(drafts, 4) in (0, 4)
    rng = random.Random(0)
    assert drafts.draw(good, batch=7, limit=16, rng=rng).tokens == 2
    assert drafts.draw(bad, batch=3, limit=16, rng=rng).tokens == 4
    assert drafts.draw(good, batch=1, limit=3, rng=rng) == Round(3, 3, 3, 3)
    assert drafts.source == "measured: 3 rounds of 2 sampled requests"
    with pytest.raises(InvalidRequest, match="never asked for a draft"):
        MeasuredDrafts({1: {1: []}}, [good])
