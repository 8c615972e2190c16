"""The buckets that steps want, and whether a round that was recorded at the start serves each of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from paceline.kernels import score_reference
from paceline.runner.rounds.buckets import TOPS, Bucket, Drafts, Grid
from paceline.runner.rounds.device_state import DeviceState
from paceline.runner.rounds.graphs import Graphs
from paceline.runner.rounds.protocol import Landed, Offer, Seat
from paceline.runner.rounds.scores import Scorer
from paceline.runner.rounds.wanted import WantedBuckets, drafts_of
from paceline.sampling.sampler import Sampler
from paceline.types import SamplingParams

VOCAB = 64
LANES = 16
GRID = Grid(lanes=LANES, longest=2100, max_draft=8, max_drafted=LANES * 8)
PARAMETERS = (
    {},
    {"temperature": 0.8, "top_p": 0.9},
    {"logprobs": 0},
    {"logprobs": TOPS[-1]},
    {"repetition_penalty": 1.1},
    {"logit_bias": {3: -1.0}},
    {"min_tokens": 5},
    {"presence_penalty": 0.5, "logprobs": 3},
)


def forward_in_name_only() -> Any:
    return "a model with KV memory of its own"


@dataclass
class Named:
    """The part of a drafter that buckets depend on."""

    finds_fewer: bool
    taps: tuple[int, ...] = ()
    reader: Any = None
    tree: bool = False
    max_draft: int = 8


HEAD, LOOKUP, MODEL = Named(True, (1, 2), max_draft=5), Named(True), Named(False)
TREE = Named(True, (1, 2), tree=True)


@dataclass
class BySeats(Named):
    """Trees for up to four sequences, chains for more."""

    def sized(self, seats: int, most: int) -> Named:
        return TREE if seats <= 4 else HEAD


BY_SEATS = BySeats(True, (1, 2))


@dataclass
class Portfolio(Named):
    """A network with copies beside it."""

    max_copy: int = 8
    network: str = "eagle"


PORTFOLIO = Portfolio(True, (1, 2), max_draft=5)
OF_A_MODEL = Portfolio(True, reader=forward_in_name_only(), max_draft=5)


@dataclass
class Round:
    recorded: bool = False

    def run_once(self) -> None:
        pass

    def record(self) -> None:
        self.recorded = True


@dataclass
class Traffic:
    """Steps of an engine with random sequences."""

    drafters: Mapping[str, Named]
    wanted: WantedBuckets = field(init=False)
    graphs: Graphs[Round] = field(init=False)

    def __post_init__(self) -> None:
        state = DeviceState(lanes=LANES, width=32, scratch_page=0, device="cpu")
        self.wanted = WantedBuckets(GRID, self.drafters, Scorer(state, score_reference), vocab_size=VOCAB)  # type: ignore[arg-type]
        self.graphs = Graphs(lambda bucket: Round(), has_room=lambda: True)

    def start(self, *, scores: int) -> None:
        known = [*drafts_of(self.drafters, GRID, {})]  # type: ignore[arg-type]
        self.graphs.start(GRID.start(known, scores=scores), seconds=1e9)

    def steps(self, count: int, rng: random.Random, *, grammars: bool) -> Iterator[tuple[Bucket, Bucket, Round]]:
        """Yield for each step the bucket that it wants, the one that serves it, and its round."""
        for _ in range(count):
            lanes = rng.sample(range(LANES), rng.randint(1, LANES))
            for lane in lanes:
                params = SamplingParams.of(**rng.choice(PARAMETERS))
                self.wanted.write(lane, Sampler(params, seed=lane, vocab_size=VOCAB, eos_ids=(0,)))
            drafter = rng.choice([None, *self.drafters])
            seats = [self._seat(lane, rng, None if drafter is None else self.drafters[drafter]) for lane in lanes]
            masks = grammars and rng.random() < 0.5
            wanted = self.wanted.find(seats, drafter, rng.choice([100, 700, 2000]), masks=masks)
            serves, made = self.graphs.find(wanted)
            yield wanted, serves, made
            found = [rng.randint(0, seat.longest) for seat in seats]
            self.wanted.learn(serves, seats, [Landed((), (1,) * n, (1,)) for n in found])

    def _seat(self, lane: int, rng: random.Random, by: Named | None) -> Seat:
        if rng.random() < 0.2:  # a prediction, or tokens that a grammar forces
            return Seat(lane, rng.randint(1, GRID.max_draft), Offer(3, (1, 2)))
        draft = rng.randint(0, 0 if by is None else by.max_draft)
        if not isinstance(by, Portfolio):
            return Seat(lane, draft)
        draft *= rng.random() < 0.7  # else the network rests
        return Seat(lane, draft, max_copy=min(draft, 8) if by.reader else rng.choice([0, 4, 8]), sure=3)


ENGINES = [
    {},
    {"eagle": HEAD},
    {"eagle": TREE},
    {"eagle": BY_SEATS},
    {"ngram": LOOKUP},
    {"model": MODEL},
    {"eagle": HEAD, "ngram": LOOKUP},
    {"portfolio": PORTFOLIO, "eagle": HEAD},
    {"portfolio": OF_A_MODEL},
]


@pytest.mark.unwatched
@pytest.mark.parametrize("drafters", ENGINES, ids=lambda drafters: "+".join(drafters) or "plain")
def test_no_step_of_ordinary_traffic_runs_eagerly(drafters: Mapping[str, Named]) -> None:
    """Whatever sequences ask for, and whoever drafts for them: predictions, and grammars in half of the steps."""
    traffic = Traffic(drafters)
    traffic.start(scores=1 + TOPS[-1])
    steps = [*traffic.steps(300, random.Random(1), grammars=True)]
    eager = [wanted for wanted, _, made in steps if not made.recorded]
    assert not eager
    assert len({wanted for wanted, _, _ in steps}) > 50, "the steps differ"
    passes = [(wanted.draft, serves.draft) for wanted, serves, _ in steps if wanted.drafter not in (None, "ngram")]
    assert all(wanted == run for wanted, run in passes), "no pass of a drafter runs for nothing"


def test_without_rounds_for_parameters_steps_run_eagerly() -> None:
    """The test above can fail."""
    traffic = Traffic({"eagle": HEAD})
    traffic.start(scores=0)
    assert any(not made.recorded for _, _, made in traffic.steps(50, random.Random(1), grammars=False))


def test_a_penalty_among_many_costs_no_larger_drafts() -> None:
    """The head runs as many passes as without, over as many rows."""
    traffic = Traffic({"eagle": HEAD})
    traffic.start(scores=1 + TOPS[-1])
    samplers = {
        name: Sampler(SamplingParams.of(**params), seed=0, vocab_size=VOCAB, eos_ids=())
        for name, params in (("plain", {}), ("penalty", {"repetition_penalty": 1.1}))
    }
    served = {}
    for name, sampler in samplers.items():
        traffic.wanted.write(0, sampler)
        seats = [Seat(lane, 4) for lane in range(LANES)]
        served[name], _ = traffic.graphs.find(traffic.wanted.find(seats, "eagle", 2000))
    assert served["penalty"].edits
    assert served["plain"] == replace(served["penalty"], edits=False, scores=0)


def test_trees_are_drafted_whole() -> None:
    """Fewer of a tree's tokens would need as many passes, and kernels and graphs of their own."""
    traffic = Traffic({"eagle": TREE})
    for longest in (1, 4, 8):
        wanted = traffic.wanted.find([Seat(0, longest), Seat(1, 0)], "eagle", 100)
        assert wanted.draft == TREE.max_draft
        assert wanted.rows <= 2 + 2 * 8
    assert traffic.wanted.find([Seat(0, 0)], "eagle", 100).draft == 0
    start = [*GRID.start([("eagle", Drafts(8, finds_fewer=False, plain=True, whole=True))])]
    assert {bucket.draft for bucket in start} == {0, 8}


def test_rounds_of_a_size_have_drafts_of_one_kind() -> None:
    """The start records no round for drafts that its number of seats never gets."""
    traffic, known = Traffic({"eagle": BY_SEATS}), [*drafts_of({"eagle": BY_SEATS}, GRID, {})]  # type: ignore[dict-item]
    start = {(bucket.seats, bucket.draft) for bucket in GRID.start(known) if bucket.draft}
    assert start == {(seats, 8) for seats in (1, 2, 3, 4)} | {
        (seats, draft) for seats in (6, 8, 12, 16) for draft in (1, 2, 3, 4, 5)
    }
    for count, draft in ((4, 8), (5, 5)):
        seats = [Seat(lane, 8) for lane in range(count)]
        assert traffic.wanted.find(seats, "eagle", 100).draft == draft, "a chain has no more tokens than it may"


def test_the_same_seats_want_rows_for_what_was_found_lately() -> None:
    """A bucket is kept while nothing changes; a sequence that is written to a lane may change everything."""
    traffic, seats = Traffic({"eagle": HEAD}), [Seat(lane, 4) for lane in range(LANES)]
    first = traffic.wanted.find(seats, "eagle", 100)
    assert traffic.wanted.find([*seats], "eagle", 100) is first
    for _ in range(20):
        traffic.wanted.learn(first, seats, [Landed((), (1,), (1,)) for _ in seats])
    fewer = traffic.wanted.find(seats, "eagle", 100)
    assert fewer == replace(first, rows=fewer.rows)
    assert fewer.rows < first.rows
    traffic.wanted.write(0, Sampler(SamplingParams.of(repetition_penalty=1.1), seed=0, vocab_size=VOCAB, eos_ids=()))
    assert traffic.wanted.find(seats, "eagle", 100).edits
    assert traffic.wanted.find(seats[1:], "eagle", 100).seats == LANES
    assert traffic.wanted.find(seats[:2], "eagle", 100).seats == 2


def test_a_portfolio_has_rounds_with_and_without_its_network() -> None:
    """Copies need no passes, and rounds of one length serve shorter ones. A model always runs."""
    traffic = Traffic({"portfolio": PORTFOLIO})
    traffic.start(scores=0)
    for seats, draft, copies in (
        ([Seat(0, 5, max_copy=8, sure=3), Seat(1, 2, max_copy=4, sure=3)], 5, 8),
        ([Seat(0, 3, max_copy=3, sure=3)], 3, 4),
        ([Seat(0, 0, max_copy=4, sure=3), Seat(1, 0)], 0, 4),
        ([Seat(0, 2), Seat(1, 0)], 2, 0),
        ([Seat(0, 0), Seat(1, 0)], 0, 0),
    ):
        wanted = traffic.wanted.find(seats, "portfolio", 100)
        assert (wanted.draft, wanted.copies, wanted.drafter) == (draft, copies, "portfolio")
        served, made = traffic.graphs.find(wanted)
        assert made.recorded
        assert served.draft == draft
    alone = traffic.wanted.find([Seat(lane, 0, max_copy=8, sure=3) for lane in range(4)], "portfolio", 100)
    assert alone.rows == 4 + 4 * 8
    for by, lengths in ((PORTFOLIO, {0, 1, 2, 3, 4, 5}), (OF_A_MODEL, {1, 2, 3, 4, 5})):
        start = [*GRID.start([*drafts_of({"portfolio": by}, GRID, {})])]  # type: ignore[dict-item]
        assert {bucket.draft for bucket in start if bucket.copies} == lengths
        needed = [bucket for bucket in start[: GRID.needed(start)] if bucket.copies and bucket.seats == LANES]
        rows = {draft: [bucket.rows for bucket in needed if bucket.draft == draft] for draft in lengths}
        assert rows[5] == [LANES + 8 * LANES, 128], "all that may be copied, or what the network drafts"
        assert all(len(each) == 2 for each in rows.values()), "each graph takes time and memory"


def test_steps_with_masks_in_turn_with_others_look_for_no_new_bucket() -> None:
    traffic, seats = Traffic({"eagle": HEAD}), [Seat(lane, 2) for lane in range(3)]
    with_masks, without = (traffic.wanted.find(seats, "eagle", 100, masks=masks) for masks in (True, False))
    assert with_masks == replace(without, masks=True)
    for _ in range(2):
        assert traffic.wanted.find([*seats], "eagle", 100, masks=True) is with_masks
        assert traffic.wanted.find([*seats], "eagle", 100) is without
