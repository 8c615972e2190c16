from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.runner.rounds.buckets import CHEAP_ROWS, DRAFTS, LEAST_CONTEXT, START_CONTEXT, Bucket, Grid

EIGHT = Bucket(seats=8, rows=40, draft=4, drafter="model", context=512, filters=False)
GRID = Grid(lanes=64, longest=131_090, max_draft=16, max_drafted=512)
DRAFTERS = {"model": (5, False), "ngram": (16, True)}


@pytest.mark.parametrize(
    ("change", "serves"),
    [
        ({}, True),
        ({"seats": 7, "rows": 35}, True),
        ({"context": 128}, True),
        ({"seats": 9}, False),
        ({"rows": 41}, False),
        ({"context": 1024}, False),
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
    assert replace(EIGHT, filters=True).cost > EIGHT.cost


def test_contexts_are_few_and_wide_enough() -> None:
    grid = replace(GRID, longest=9000)
    bounds = [grid.context(context) for context in range(1, 9001)]
    assert all(context <= bound <= max(LEAST_CONTEXT, 4 * context) for context, bound in enumerate(bounds, start=1))
    assert sorted({*bounds}) == [LEAST_CONTEXT, 2048, 8192, 9000]
    assert replace(GRID, longest=100).context(3) == 100


def test_seats() -> None:
    counts = (1, 2, 3, 4, 5, 7, 9, 13, 16, 17, 25, 33, 49, 64)
    assert [GRID.seats(count) for count in counts] == [1, 2, 3, 4, 6, 8, 12, 16, 16, 24, 32, 48, 64, 64]
    assert len({GRID.seats(count) for count in range(1, 65)}) == 12
    assert [replace(GRID, lanes=9).seats(count) for count in (8, 9)] == [8, 9], "no seat more than there are lanes"


def test_rows() -> None:
    """Few rows are as good as none; many are counted, up to what all seats can draft."""
    assert GRID.rows(8, 0, 0) == 8
    assert [GRID.rows(8, 4, wanted) for wanted in (1, 9, 32)] == [40, 40, 40]
    assert [GRID.rows(16, 4, wanted) for wanted in (1, 48, 49, 64)] == [64, 64, 80, 80]
    assert [GRID.rows(64, 4, wanted) for wanted in (1, 64, 65, 192, 193, 256)] == [128, 128, 192, 256, 320, 320]
    assert GRID.rows(64, 16, 512) == 576, "drafted tokens of a round have a limit"
    assert all(
        min(seats + wanted, seats * 5) <= GRID.rows(seats, 4, wanted) <= max(CHEAP_ROWS, seats + wanted + CHEAP_ROWS)
        for seats in (1, 3, 24, 64)
        for wanted in range(1, 4 * seats + 1)
    )


def test_drafts() -> None:
    lengths = (0, 1, 6, 7, 8, 11, 16, 100)
    assert [GRID.draft(length, finds_fewer=False) for length in lengths] == [0, 1, 6, 6, 8, 8, 16, DRAFTS[-1]]
    assert [GRID.draft(length, finds_fewer=True) for length in (0, 1, 4, 5, 9, 16)] == [0, 4, 4, 8, 16, 16]
    short = replace(GRID, max_draft=5)
    assert [short.draft(length, finds_fewer=True) for length in (3, 5)] == [4, 5]


def test_the_first_of_the_start_serve_any_step() -> None:
    """Twelve serve all plain steps, and as many more for each drafter and length all steps that draft."""
    start = list(GRID.start(DRAFTERS))
    assert len(start) == len({*start})
    plain = [Bucket(GRID.seats(n), GRID.seats(n), 0, None, GRID.longest, True) for n in range(1, 65)]
    assert all(any(made.serves(wanted) for made in start[:12]) for wanted in plain)
    assert all(made.draft == 0 for made in start[:12])
    lengths = 5 + 3
    general = start[12 : 12 * (1 + lengths)]
    assert {(made.drafter, made.draft) for made in general} == {
        *(("model", k) for k in (1, 2, 3, 4, 5)),
        *(("ngram", k) for k in (4, 8, 16)),
    }
    assert all(made.filters and made.context == GRID.longest for made in general)
    assert all(made.rows == made.seats + min(made.seats * made.draft, 512) for made in general)


def test_the_start_is_on_the_grid() -> None:
    """A bucket that no step can want would be recorded for nothing."""
    for made in GRID.start(DRAFTERS):
        assert made.seats == GRID.seats(made.seats)
        assert made.context == GRID.context(made.context)
        assert made.context <= START_CONTEXT or made.context == GRID.longest
        assert made.rows == GRID.rows(made.seats, made.draft, made.rows - made.seats)
        finds_fewer = made.drafter is not None and DRAFTERS[made.drafter][1]
        assert made.draft == GRID.draft(made.draft, finds_fewer=finds_fewer)


def test_every_short_step_is_in_the_start() -> None:
    start = {*GRID.start(DRAFTERS)}
    for seats in (1, 5, 16, 40, 64):
        for drafted in (1, seats, 3 * seats, 5 * seats):
            count = GRID.seats(seats)
            wanted = Bucket(count, GRID.rows(count, 5, drafted), 5, "model", GRID.context(700), False)
            assert wanted in start
