from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from paceline.runner.rounds.buckets import DRAFTS, LEAST_CONTEXT, START_CONTEXT, TILES, Bucket, Drafts, Grid

EIGHT = Bucket(seats=8, rows=40, draft=4, drafter="model", context=512)
GRID = Grid(lanes=64, longest=131_090, max_draft=16, max_drafted=512)
DRAFTERS = {"model": Drafts(5, finds_fewer=False), "ngram": Drafts(16, finds_fewer=True)}


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
        ({"draft": 0}, False),  # a plain step pays for no pass of the drafter
        ({"drafter": "self"}, False),
        ({"edits": True}, False),
        ({"scores": 1}, False),
    ],
)
def test_what_a_graph_can_do(change: dict[str, object], serves: bool) -> None:
    assert EIGHT.serves(replace(EIGHT, **change)) is serves


def test_a_graph_copies_no_more_tokens_than_it_has_room_for() -> None:
    copying = replace(EIGHT, copies=4)
    assert copying.serves(EIGHT)
    assert not EIGHT.serves(copying)
    assert not copying.serves(replace(EIGHT, copies=8))
    alone = replace(copying, draft=0)
    assert not alone.serves(replace(EIGHT, draft=0)), "a plain step verifies no rows of copies"
    assert not copying.serves(alone), "copies alone pay for no pass of the network"


def test_a_graph_that_edits_serves_those_who_do_not() -> None:
    assert replace(EIGHT, edits=True).serves(EIGHT)
    assert replace(EIGHT, edits=True).cost > EIGHT.cost


def test_scores_have_few_sizes() -> None:
    tops = (None, 0, 1, 5, 6, 20, 21, 64, 65)
    assert [GRID.scores(top) for top in tops] == [0, 1, 6, 6, 21, 21, 33, 65, 129]
    assert replace(EIGHT, scores=6).serves(replace(EIGHT, scores=1))
    assert not replace(EIGHT, scores=6).serves(replace(EIGHT, scores=21))


def test_contexts_are_few_and_wide_enough() -> None:
    grid = replace(GRID, longest=9000)
    bounds = [grid.context(context) for context in range(1, 9001)]
    assert all(context <= bound <= max(LEAST_CONTEXT, 8 * context) for context, bound in enumerate(bounds, start=1))
    assert sorted({*bounds}) == [LEAST_CONTEXT, 2048, 9000], "8192 is as good as all of it"
    assert replace(GRID, longest=100).context(3) == 100


def test_seats() -> None:
    counts = (1, 2, 3, 4, 5, 7, 9, 13, 16, 17, 25, 33, 49, 64)
    assert [GRID.seats(count) for count in counts] == [1, 2, 3, 4, 6, 8, 12, 16, 16, 24, 32, 48, 64, 64]
    assert len({GRID.seats(count) for count in range(1, 65)}) == 12
    assert [replace(GRID, lanes=9).seats(count) for count in (8, 9)] == [8, 9], "no seat more than there are lanes"


def test_rows() -> None:
    """The sizes of tiles, then multiples of the largest, up to what all seats can draft."""

    def rows(seats: int, draft: int, *wanted: int) -> list[int]:
        return [GRID.rows(seats, draft, count, finds_fewer=False) for count in wanted]

    assert rows(8, 0, 0) == [8]
    assert rows(8, 4, 1, 9, 25, 32) == [16, 32, 40, 40]
    assert rows(16, 4, 1, 17, 48, 49, 64) == [32, 64, 64, 80, 80]
    assert rows(64, 4, 1, 64, 65, 192, 193, 256) == [128, 128, 192, 256, 320, 320]
    assert rows(64, 16, 512) == [576], "drafted tokens of a round have a limit"
    assert all(
        seats + wanted <= count <= max(2 * (seats + wanted), TILES[0], seats + wanted + TILES[-1])
        for seats in (1, 3, 24, 64)
        for wanted, count in enumerate(rows(seats, 4, *range(4 * seats + 1)))
    )


def test_rows_of_a_lookup_are_powers_of_two() -> None:
    counts = [GRID.rows(64, 16, wanted, finds_fewer=True) for wanted in (1, 64, 65, 300, 449, 512)]
    assert counts == [128, 128, 256, 512, 576, 576]


def test_drafts() -> None:
    lengths = (0, 1, 6, 7, 8, 11, 16, 100)
    assert [GRID.draft(length, finds_fewer=False) for length in lengths] == [0, 1, 6, 6, 8, 8, 16, DRAFTS[-1]]
    assert [GRID.draft(length, finds_fewer=True) for length in (0, 1, 4, 5, 9, 16)] == [0, 4, 4, 16, 16, 16]
    short = replace(GRID, max_draft=5)
    assert [short.draft(length, finds_fewer=True) for length in (3, 5)] == [4, 5]


def test_the_first_of_the_start_serve_any_step() -> None:
    """Twelve serve all plain steps, and then some of each drafter and length all steps that draft."""
    start = list(GRID.start(DRAFTERS.items()))
    assert len(start) == len({*start})
    plain = [Bucket(GRID.seats(n), GRID.seats(n), 0, None, GRID.longest) for n in range(1, 65)]
    assert all(any(made.serves(wanted) for made in start[:12]) for wanted in plain)
    general = list(itertools.takewhile(lambda made: made.context == GRID.longest, start))
    model = [made for made in general if made.drafter == "model"]
    assert model == start[12:72]
    assert {made.draft for made in model} == {1, 2, 3, 4, 5}
    assert all(made.rows == made.seats * (1 + made.draft) for made in model)
    lookups = [made for made in general if made.drafter == "ngram"]
    assert {made.draft for made in lookups} == {4, 16}
    assert all(
        any(made.serves(wanted) for made in lookups)
        for seats in (1, 7, 64)
        for wanted in [Bucket(GRID.seats(seats), seats + min(16 * seats, 512), 16, "ngram", 9000)]
    )


def test_the_start_is_on_the_grid() -> None:
    """A bucket that no step can want would be recorded for nothing."""
    for made in GRID.start(DRAFTERS.items()):
        assert made.seats == GRID.seats(made.seats)
        assert made.context == GRID.context(made.context)
        assert made.context <= START_CONTEXT or made.context == GRID.longest
        finds_fewer = made.drafter is not None and DRAFTERS[made.drafter].finds_fewer
        assert made.rows == GRID.rows(made.seats, made.draft, made.rows - made.seats, finds_fewer=finds_fewer)
        assert made.draft == GRID.draft(made.draft, finds_fewer=finds_fewer)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_short_step_is_in_the_start(drafter: str) -> None:
    start, finds_fewer = {*GRID.start(DRAFTERS.items())}, DRAFTERS[drafter].finds_fewer
    draft = GRID.draft(4, finds_fewer=finds_fewer)
    for seats in (1, 5, 16, 40, 64):
        for drafted in (1, seats, 3 * seats, 4 * seats):
            count = GRID.seats(seats)
            rows = GRID.rows(count, draft, drafted, finds_fewer=finds_fewer)
            assert Bucket(count, rows, draft, drafter, GRID.context(700)) in start


def test_a_drafter_with_plain_rounds_of_its_own() -> None:
    start = list(GRID.start([("head", Drafts(2, finds_fewer=False, plain=True))]))
    assert [made.drafter for made in start[:24]] == [None] * 12 + ["head"] * 12
    assert {made.draft for made in start[:24]} == {0}


def test_samples_are_of_all_sizes() -> None:
    """Drafts of every length with the largest context, the longest beside offers with every context."""
    samples = list(GRID.samples(DRAFTERS.items()))
    assert len(samples) == len({*samples})
    seats = {GRID.seats(count) for count in range(1, 65)}
    assert {(made.seats, made.draft) for made in samples if made.drafter == "model"} == {
        (count, draft) for count in seats for draft in range(1, 6)
    }
    for drafter, draft in ((None, 0), ("model", 5), ("ngram", 16)):
        kinds = {(made.offers, made.context) for made in samples if (made.drafter, made.draft) == (drafter, draft)}
        assert kinds == {*itertools.product((0, 4, 16), GRID.contexts())}
    head = GRID.samples([("head", Drafts(2, finds_fewer=False, plain=True))])
    assert {made.draft for made in head if made.drafter == "head"} == {0, 1, 2}


def test_offers_have_few_buckets() -> None:
    offering = replace(EIGHT, offers=8)
    assert (EIGHT.longest, offering.longest, replace(offering, draft=12).longest) == (4, 8, 12)
    assert offering.serves(replace(EIGHT, offers=4))
    assert offering.serves(EIGHT), "it drafts anyway"
    assert offering.shape > EIGHT.shape, "attention has longer blocks"
    assert not EIGHT.serves(offering)
    plain = replace(EIGHT, draft=0, rows=8)
    assert not replace(offering, draft=0).serves(plain), "a plain step pays for no rows of a draft"


def test_offers_at_the_start() -> None:
    """Only where the host has drafters, or for the parameters of some requests."""
    assert not any(made.offers for made in GRID.start(DRAFTERS.items()))
    start = list(GRID.start({}, offers=16))
    offering = [made for made in start if made.offers]
    assert {made.offers for made in offering} == {4, 16}
    assert all((made.drafter, made.draft) == (None, 0) for made in start)
    assert all(
        made.rows == GRID.rows(made.seats, made.offers, made.rows - made.seats, finds_fewer=True) for made in offering
    )


def test_rounds_with_parameters_are_at_the_start() -> None:
    """Behind those that serve all other steps, and before cheaper ones; none without memory for their tables."""
    start = list(GRID.start(DRAFTERS.items(), offers=16, scores=21))
    assert len(start) == len({*start})
    first = next(index for index, made in enumerate(start) if made.edits)
    assert {made.context for made in start[:first]} == {GRID.longest}
    without = list(GRID.start(DRAFTERS.items(), offers=16))
    assert start[:first] == without[:first], "steps without parameters come first"
    assert without[first].context < GRID.longest
    cheaper = next(index for index, made in enumerate(start) if made.context < GRID.longest)
    assert {made.masks for made in start[first:cheaper]} == {False, True}
    assert all((made.edits, made.scores) == (True, 21) for made in start[first:cheaper])
    assert not any(made.edits or made.masks for made in without)


@pytest.mark.parametrize("drafters", [[], [("head", Drafts(4, finds_fewer=False, plain=True))]])
def test_buckets_that_serve_every_step_come_first(drafters: dict[str, Drafts]) -> None:
    grid = Grid(lanes=8, longest=9000, max_draft=4, max_drafted=32)
    buckets = [*grid.start(drafters, scores=21)]
    first = buckets[: grid.needed(buckets)]
    assert 0 < len(first) < len(buckets)
    assert all(any(one.serves(bucket) for one in first) for bucket in buckets if not bucket.offers)
