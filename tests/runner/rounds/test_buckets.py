from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.runner.rounds.buckets import (
    DRAFTS,
    LEAST_CONTEXT,
    PATIENCE,
    Bucket,
    Choice,
    context_bound,
    draft_length,
    draft_rows,
    offer_length,
    seat_count,
)

EIGHT = Bucket(seats=8, rows=40, draft=4, drafter="model", context=512, filters=False)


@pytest.mark.parametrize(
    ("change", "serves"),
    [
        ({}, True),
        ({"seats": 7, "rows": 35}, True),
        ({"context": 128}, True),
        ({"seats": 9}, False),
        ({"rows": 41}, False),
        ({"context": 1024}, False),
        ({"context": 127}, False),  # attention would be divided for a context four times as long
        ({"draft": 3}, True),
        ({"draft": 5}, False),
        ({"draft": 0, "drafter": None}, False),
        ({"drafter": "self"}, False),
        ({"filters": True}, False),
    ],
)
def test_what_a_graph_can_do(change: dict[str, object], serves: bool) -> None:
    assert EIGHT.serves(replace(EIGHT, **change)) is serves


def test_a_graph_that_filters_serves_those_who_do_not() -> None:
    assert replace(EIGHT, filters=True).serves(EIGHT)


def test_many_rows_cost_something() -> None:
    large = replace(EIGHT, seats=64, rows=320)
    assert large.serves(replace(large, rows=256))
    assert not large.serves(replace(large, rows=255))


def test_a_shape_of_its_own_only_for_what_lasts() -> None:
    choice, seven = Choice(), replace(EIGHT, seats=7, rows=35)
    assert choice.choose(EIGHT, []) == EIGHT
    assert [choice.choose(seven, [EIGHT]) for _ in range(PATIENCE)] == [EIGHT] * PATIENCE
    assert choice.choose(seven, [EIGHT]) == seven
    assert choice.choose(seven, [EIGHT, seven]) == seven
    assert choice.choose(seven, [EIGHT]) == EIGHT, "dropped since: it has to last again"


def test_the_closest_that_serves() -> None:
    """The fewest rows cost least; then seats, then context."""
    six, seven = replace(EIGHT, seats=6, rows=30), replace(EIGHT, seats=7, rows=35)
    assert Choice().choose(six, [EIGHT, replace(seven, context=1024), seven]) == seven
    assert Choice().choose(six, [replace(seven, seats=6, rows=36), seven]) == seven
    assert Choice().choose(six, [replace(seven, seats=8), seven]) == seven


def test_contexts_are_few_and_wide_enough() -> None:
    bounds = [context_bound(context, most=2010) for context in range(1, 2011)]
    assert all(bound >= context for context, bound in enumerate(bounds, start=1))
    assert sorted({*bounds}) == [LEAST_CONTEXT, 1024, 2010]
    assert [context_bound(context, most=9999) for context in (512, 513, 1024, 1025)] == [512, 1024, 1024, 2048]


def test_seats_rows_and_drafts() -> None:
    counts = (1, 2, 7, 8, 9, 10, 11, 16, 17, 33, 65)
    assert [seat_count(count) for count in counts] == [1, 2, 7, 8, 10, 10, 12, 16, 20, 40, 80]
    assert all(count <= seat_count(count) <= 1.25 * count for count in range(1, 300))
    assert [draft_rows(wanted, most=100) for wanted in (0, 1, 4, 5, 17, 33, 90)] == [0, 4, 4, 8, 24, 48, 96]
    assert all(min(wanted, 50) <= draft_rows(wanted, most=50) <= 50 for wanted in range(100))
    assert [draft_length(length) for length in (0, 1, 6, 7, 8, 11, 100)] == [0, 1, 6, 6, 8, 8, DRAFTS[-1]]


def test_offers_have_few_buckets() -> None:
    assert [offer_length(length, most=20) for length in (0, 1, 4, 5, 9, 16, 17, 20)] == [0, 4, 4, 8, 16, 16, 20, 20]
    assert offer_length(3, most=2) == 2
    offering = replace(EIGHT, offers=8)
    assert (EIGHT.longest, offering.longest, replace(offering, draft=12).longest) == (4, 8, 12)
    assert offering.serves(replace(EIGHT, offers=4))
    assert not offering.serves(EIGHT), "a step without offers pays for the longest"
    assert not EIGHT.serves(offering)
