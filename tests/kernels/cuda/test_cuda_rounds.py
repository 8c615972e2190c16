"""Rounds on a device, launched without an engine: buckets, and the same outcomes as the portable rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.drafters.eagle import on_device
from paceline.drafters.model import ModelOnDevice
from paceline.kernels.cuda.tiles import FEW_ROWS, FEWER_ROWS
from paceline.models.block_config import Markov
from paceline.runner.forwards.device_batch import padded_rows
from paceline.runner.forwards.torch import TorchForward
from paceline.runner.rounds.cuda import CudaRounds, _parts
from paceline.runner.rounds.cuda_chunks import ReadChunks
from paceline.runner.rounds.cuda_ticket import Ticket
from paceline.runner.rounds.protocol import Chunk, Landed, Offer, Rounds, Seat, Times
from paceline.runner.rounds.upload import Upload
from paceline.runner.rounds.wanted import OFFERED
from tests.kernels.cuda.conftest import ON_GPU
from tests.kernels.cuda.round_pairs import (
    AGAIN,
    LANES,
    OPTIONS,
    PAGES,
    both,
    enter,
    forward,
    pair,
    weights,
)
from tests.kernels.tiny_forward import PLAIN
from tests.odd_drafters import TreesOnDevice


@pytest.mark.parametrize(("drafter", "longest"), [("model", 2), ("parallel", 3), ("self", 2), ("ngram", 3)])
def test_drafts_as_those_of_portable_rounds(drafter: str, longest: int, device: torch.device) -> None:
    """A lane with all filters and a greedy one, whose limits differ; then the greedy one alone."""
    made = pair(device, drafter)
    assert [*made[0].readers] == [*made[1].readers] == ([drafter] if drafter in ("model", "parallel") else [])
    for rounds in made:
        enter(rounds, 2, [5, 6, 7, 8, 5, 6], temperature=0.8, top_k=40, top_p=0.95, min_p=0.01)
        enter(rounds, 0, [1, 2, 3, 1], temperature=0)
    behind = [Chunk(2, 0, 5, draws=False, drafts=True), Chunk(0, 0, 3, draws=False, drafts=True)]
    assert both(made, behind, [], drafter) == ([None, None], [])
    _, landed = both(made, [], [Seat(2, longest), Seat(0, longest - 1)], drafter)
    assert [len(each.drafted) for each in landed] == [longest, longest - 1]
    both(made, [], [Seat(0, 1)], drafter)
    assert torch.equal(made[0]._state.lengths.cpu(), made[1]._state.lengths)
    assert made[0].round_seconds(1, 1, drafter) is None or ON_GPU


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("eagle", {}),
        ("eagle", {"hidden": 32, "norm_first": True}),
        ("eagle", {"branches": 2}),
        ("eagle", {"branches": None}),
        ("block", {}),
        ("block", {"markov": Markov("rnn", 8), "anchor_first": True, "window": 7}),
        *([] if ON_GPU else [("medusa", {})]),
    ],
    ids=str,
)
@pytest.mark.slow
def test_heads_as_in_portable_rounds(
    drafter: str, options: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in one chunk and in two, drafts of several lengths, plain steps between them, and a step whose states are
    not held. Without a choice of branches two seats get trees, and three get chains."""
    monkeypatch.setattr(on_device, "TREE_SEATS", 2)
    made = pair(device, drafter, **options)
    assert [*made[0].tapping] == [*made[1].tapping] == [drafter]
    for rounds in made:
        enter(rounds, 2, [5, 6, 7, 8, 5, 6], temperature=0.8, top_k=40, top_p=0.95, min_p=0.01)
        enter(rounds, 0, [1, 2, 3, 1], temperature=0)
        enter(rounds, 1, [4, 2], temperature=0.7)
    begun = [Chunk(2, 0, 4, draws=False, drafts=True), Chunk(0, 0, 4, draws=True, drafts=True)]
    both(made, [*begun, Chunk(1, 0, 2, draws=True)], [], drafter)
    assert both(made, [Chunk(2, 4, 2, draws=True, drafts=True)], [Seat(0, 3)], drafter)[1][0].drafted
    lengths = []
    for turn in range(2):
        _, landed = both(made, [], [Seat(2, 3), Seat(0, turn), Seat(1, 2)], drafter)
        lengths += [len(each.drafted) for each in landed]
    assert len({*lengths}) > 2
    both(made, [], [Seat(0, 0), Seat(1, 0)], drafter)  # plain, with states
    both(made, [], [Seat(2, 0)], None)  # without
    _, landed = both(made, [], [Seat(2, 3), Seat(1, 2)], drafter)
    assert landed[0].drafted == ()
    if drafter != "block":  # where states were lost it finds rows of its own blocks, and the portable one finds none
        assert both(made, [], [Seat(2, 3)], drafter)[1][0].drafted != ()


def test_blocks_as_in_portable_rounds(device: torch.device) -> None:
    """A markov head asks for the token that was drafted before, or for the last committed one."""
    made = pair(device, "block", markov=Markov("gated", 8), layers=1)
    for rounds in made:
        enter(rounds, 2, [5, 6, 7, 8, 5, 6], temperature=0.8, top_k=40)
        enter(rounds, 0, [1, 2, 3, 1], temperature=0)
    both(made, [Chunk(2, 0, 6, draws=True, drafts=True), Chunk(0, 0, 4, draws=True, drafts=True)], [], "block")
    drafts = [both(made, [], [Seat(2, 3), Seat(0, limit)], "block")[1] for limit in (2, 3, 3)]
    assert max(len(landed.drafted) for each in drafts for landed in each) == 3


@pytest.mark.parametrize("drafter", AGAIN)
def test_a_device_drafter_from_outside(drafter: str, device: torch.device) -> None:
    made = pair(device, drafter)
    for rounds in made:
        enter(rounds, 2, [5, 6, 7, 8, 5, 6], temperature=0.8)
        enter(rounds, 0, [1, 2, 3, 1], temperature=0)
    both(made, [Chunk(2, 0, 5, draws=False), Chunk(0, 0, 3, draws=False)], [], drafter)
    _, landed = both(made, [], [Seat(2, 4), Seat(0, 2)], drafter)
    longest = (2, 1) if AGAIN[drafter].finds_fewer else (4, 2)
    assert [each.drafted for each in landed] == [(6,) * longest[0], (1,) * longest[1]]
    both(made, [], [Seat(2, 2), Seat(0, 1)], drafter)


def test_trees(device: torch.device) -> None:
    """Trees of which most have the right path somewhere, in a bucket that has room for some of their nodes."""
    texts: dict[int, list[int]] = {2: [5, 6, 7, 8, 5, 6], 0: [1, 2, 3, 1]}
    heat = {2: 0.8, 0: 0.0}

    def start(rounds: Rounds) -> None:
        for lane, text in texts.items():
            enter(rounds, lane, text, temperature=heat[lane])
        chunks = [Chunk(lane, 0, len(text) - 1, draws=False) for lane, text in texts.items()]
        rounds.collect(rounds.launch(chunks, [], drafter=None, context=30))

    _, plain = pair(device)
    start(plain)
    seats = [Seat(lane, 0) for lane in texts]
    said = [plain.collect(plain.launch([], seats, drafter=None, context=30))[1] for _ in range(14)]
    answers = [[*text, *(landed[i].tokens[0] for landed in said)] for i, text in enumerate(texts.values())]
    made = pair(device, "trees")
    for rounds in made:
        rounds.drafters["trees"] = TreesOnDevice(answers, nodes=5, wrong=0.5, vocab_size=PLAIN.vocab_size)
        start(rounds)
    told: list[list[int]] = [[], []]
    paths = []
    while min(map(len, told)) < 8:
        _, landed = both(made, [], [Seat(2, 5), Seat(0, 4)], "trees")
        paths += [one.path for one in landed]
        told = [[*old, *one.tokens] for old, one in zip(told, landed, strict=True)]
    for text, mine, whole in zip(texts.values(), told, answers, strict=True):
        assert [*text, *mine[:8]] == whole[: len(text) + 8]
    assert any(path != tuple(range(len(path))) for path in paths)


@pytest.mark.parametrize("drafter", [None, "model", "ngram"])
def test_offers_beside_a_drafter(drafter: str | None, device: torch.device) -> None:
    """One offer that fits and is half right, one for which a step in flight has said something else."""
    made = pair(device, drafter)
    texts = [[5, 6, 7, 8, 5, 6], [1, 2, 3, 1], [9, 8, 9, 8]]
    for rounds in made:
        for lane, text in enumerate(texts):
            enter(rounds, lane, text, temperature=0)
    behind = [Chunk(lane, 0, len(text) - 1, draws=False, drafts=True) for lane, text in enumerate(texts)]
    both(made, behind, [], drafter)
    truth = [landed.tokens[0] for landed in both(made, [], [Seat(lane, 0) for lane in range(3)], None)[1]]
    offers = [Offer(6, (truth[0], 3, 4, 5)), Offer(4, (truth[1] + 1, 3, 4))]
    seats = [Seat(0, 2, offers[0]), Seat(1, 2, offers[1]), Seat(2, 1 if drafter else 0)]
    _, landed = both(made, [], seats, drafter)
    assert [each.drafted for each in landed[:2]] == [(3, 4), ()]
    assert len(landed[2].drafted) == (drafter == "model")
    bucket = [*made[0]._graphs._eager][-1]  # no graph serves its first round
    draft = {None: 0, "model": 1, "ngram": 4}[drafter]
    assert (bucket.offers, bucket.draft, bucket.drafter) == (4, draft, drafter)
    seconds = {key for key, known in made[0]._seconds.items() if known}
    assert not seconds - {(0, None)}, "a round with offers was taken for one without"
    assert made[0]._wanted._found[OFFERED] < 1.0
    lengths = [int(length) for length in made[1]._state.lengths[:3]]
    again = Offer(lengths[1], (7,) * 9)
    _, landed = both(made, [], [Seat(1, 8, again), Seat(0, 0)], None)
    assert landed[0].drafted == (7,) * 8


def test_models_of_another_backend_are_refused(device: torch.device) -> None:
    model = TorchForward(PLAIN, weights(), num_pages=PAGES)
    with pytest.raises(TypeError, match="run models that are CudaForwards, not TorchForward"):
        CudaRounds(forward(device), drafters={"model": ModelOnDevice(model)}, graphs=False, **OPTIONS)


def test_prompts_beside_a_full_batch(device: torch.device) -> None:
    """Nine lanes, and seven seats that sit in a bucket of eight, of which the last is the dummy's."""
    made = pair(device)
    for rounds in made:
        for lane in range(LANES):
            enter(rounds, lane, [lane, lane + 1, lane + 2], seed=lane)
    drawn, _ = both(made, [Chunk(lane, 0, 3, draws=lane != 4) for lane in range(LANES)], [])
    assert [landed is None for landed in drawn] == [lane == 4 for lane in range(LANES)]
    both(made, [], [Seat(lane, 0) for lane in range(LANES)])
    both(made, [], [Seat(lane, 0) for lane in range(7)])
    shapes = [(bucket.seats, bucket.rows, bucket.draft) for bucket in made[0]._graphs._eager]
    assert shapes == [(9, 9, 0), (8, 8, 0)]
    assert made[0]._state.lengths[made[0]._state.dummy] == 1


def test_seconds_are_of_a_drafter(device: torch.device) -> None:
    """And of a plain round whoever asks. Drafters on the host share the times of rounds with offers."""
    rounds, _ = pair(device, "ngram")
    rounds.drafters = {**rounds.drafters, "other": AGAIN["again"]}
    seats = {0: [Seat(0, 0)], 4: [Seat(0, 4)]}
    for lane, (draft, drafter, took) in enumerate([(0, None, 1.0), (4, "ngram", 2.0), (4, "other", 3.0)]):
        bucket = replace(rounds._wanted.find(seats[draft], "ngram", 30), drafter=drafter, draft=draft)
        ticket = Ticket([], seats[draft] * (8 + lane), bucket, None, ReadChunks(), None, typical=True)
        rounds._learn(ticket, [Landed((), (), (1,))] * (8 + lane), Times(step=took))
    assert [rounds.round_seconds(8, 0, name) for name in ("ngram", "other")] == [1.0, 1.0]
    assert [rounds.round_seconds(8, 4, name) for name in ("ngram", "other")] == [2.0, 3.0]
    assert rounds.round_seconds(8, 4, "third") is None
    offering = [Seat(0, 3, Offer(1, (1, 2, 3, 4)))] * 8
    wanted = rounds._wanted.find(offering, None, 30)
    ticket = Ticket([], offering, wanted, None, ReadChunks(), None, typical=True)
    rounds._learn(ticket, [Landed((), (), (1,))] * 8, Times(step=4.0))
    assert [rounds.round_seconds(8, draft, "third") for draft in (0, 1, 4, 5)] == [1.0, 4.0, 4.0, None]
    assert rounds.round_seconds(20, 4, "ngram") is None  # too far from what was measured
    assert rounds.round_seconds(10, 4, "ngram") == 2.0
    assert rounds.round_seconds(10, 1, "ngram") == 2.0, "lookups of fewer tokens run in the same rounds"
    assert rounds.round_seconds(10, 1, "other") is None
    last = Ticket([], seats[4] * 10, bucket, None, ReadChunks(), None, typical=True)
    for took in (9.0, 4.0, 4.0):  # of the first three the least counts
        rounds._learn(last, [Landed((), (), (1,))] * 10, Times(step=took))
    assert rounds.round_seconds(10, 4, "other") == pytest.approx(3.1)
    rounds._learn(replace(last, typical=False), [Landed((), (), (1,))] * 10, Times(step=90.0))
    assert rounds.round_seconds(10, 4, "other") == pytest.approx(3.1), "launches one by one are not what rounds take"


@pytest.mark.skipif(not ON_GPU, reason="graphs are of a GPU")
def test_a_recorded_round_serves_smaller_steps(device: torch.device) -> None:
    """The first of four seats runs launch by launch, the second records it, and one seat then uses its graph."""
    made = pair(device)
    for rounds in made:
        for lane in range(4):
            enter(rounds, lane, [lane, lane + 1, lane + 2], temperature=0)
    both(made, [Chunk(lane, 0, 2, draws=False) for lane in range(4)], [])
    for count, recorded in ((4, 0), (4, 1), (1, 1), (3, 1)):
        both(made, [], [Seat(lane, 0) for lane in range(count)])
        assert len(made[0]._graphs) == recorded


@pytest.mark.skipif(not ON_GPU, reason="graphs are of a GPU")
@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_prepared_rounds_give_the_same_outcomes(drafter: str, device: torch.device) -> None:
    made = pair(device, drafter)
    for rounds in made:
        enter(rounds, 2, [5, 6, 7, 8, 5, 6], temperature=0.8, top_k=40)
        enter(rounds, 0, [1, 2, 3, 1], temperature=0)
    prepared = made[0].prepare({drafter: 4}, prompt_rows=64, seconds=600)
    recorded = len(made[0]._graphs)
    assert prepared is not None
    assert prepared.graphs == recorded
    assert recorded > 12
    assert not made[0].improve(), "all of the start is recorded"
    behind = [Chunk(2, 0, 5, draws=False, drafts=True), Chunk(0, 0, 3, draws=False, drafts=True)]
    both(made, behind, [], drafter)
    both(made, [], [Seat(2, 3), Seat(0, 2)], drafter)
    both(made, [], [Seat(0, 0)])
    assert len(made[0]._graphs) == recorded


def test_rounds_without_graphs_have_nothing_to_prepare(device: torch.device) -> None:
    rounds = CudaRounds(forward(device), graphs=False, **OPTIONS)
    assert rounds.prepare({}, prompt_rows=64) is None
    assert not rounds.improve()


def test_coins_instead_of_the_target(device: torch.device) -> None:
    rounds, _ = pair(device, "ngram")
    rounds.synthetic_acceptance = 1.0
    enter(rounds, 1, [1, 2, 3, 1, 2], temperature=0)
    rounds.launch([Chunk(1, 0, 4, draws=False)], [], drafter="ngram", context=30)
    _, (landed,), _ = rounds.collect(rounds.launch([], [Seat(1, 4)], drafter="ngram", context=30))
    assert (landed.accepted, landed.drafted, landed.tokens[:4]) == (4, (3, 1, 2, 3), (3, 1, 2, 3))


def test_the_bucket_of_a_round(device: torch.device) -> None:
    rounds, _ = pair(device, "ngram")
    seats = [Seat(lane, 8 - lane // 5) for lane in range(LANES)]
    bucket = rounds._wanted.find(seats, "ngram", 700)
    assert bucket.seats + 5 * 8 + 4 * 7 <= bucket.rows <= bucket.seats * 9
    assert (bucket.draft, bucket.drafter) == (8, "ngram")
    assert bucket == rounds._wanted.find(seats, "ngram", 690)
    rounds._wanted._found["ngram"] = 0.1
    assert rounds._wanted.find(seats, "ngram", 700).rows < bucket.rows
    plain = rounds._wanted.find([Seat(0, 0)], "ngram", 3)
    assert (plain.seats, plain.rows, plain.draft, plain.drafter) == (1, 1, 0, None)


def test_the_start_lets_heads_catch_up(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the kernels of it would be compiled when the first head has rested, while everybody waits."""
    rounds, late = pair(device, "eagle")[0], []

    def note(chunks: Sequence[Chunk], *_: object, edits: bool) -> None:
        late.extend([len(chunks)] * (not chunks[0].target))

    monkeypatch.setattr(rounds, "_read", note)
    rounds._read_dummies(64)
    assert late == [1, 2, 4, 8, LANES]


def test_prompts_are_padded_to_few_lengths() -> None:
    assert [padded_rows(rows) for rows in range(1, FEWER_ROWS + 1)] == [*range(1, FEWER_ROWS + 1)]
    assert {padded_rows(rows) for rows in range(FEWER_ROWS + 1, FEW_ROWS + 1)} == {32, 64}
    lengths = {rows: padded_rows(rows) for rows in range(FEW_ROWS + 1, 8193)}
    assert all(rows <= padded <= max(1.25 * rows, rows + FEW_ROWS) for rows, padded in lengths.items())
    assert len({*lengths.values()}) < 40


def test_parts_of_a_step() -> None:
    stamps = [1_000, 2_001_000, 5_001_000, 5_001_000]
    assert _parts(Times(step=0.5), stamps, waits=False) == Times(step=0.5, draft=0.002, verify=0.003)
    assert _parts(Times(step=0.004, typical=False), stamps, waits=True) == Times(
        step=0.004, typical=False, draft=0.002, verify=0.002
    )


def test_rows_do_not_shrink_while_everything_is_found(device: torch.device) -> None:
    """Limits differ, and all that they allow is drafted: there must be room for it the next time, too."""
    rounds, _ = pair(device, "ngram")
    seats = [Seat(0, 8), *(Seat(lane, 2) for lane in (1, 2, 3))]
    before = rounds._wanted.find(seats, "ngram", 30)
    for _ in range(9):
        bucket = rounds._wanted.find(seats, "ngram", 30)
        ticket = Ticket([], seats, bucket, None, ReadChunks(), None, typical=True)
        landed = [Landed((), (1,) * seat.max_draft, (1,)) for seat in seats]
        rounds._learn(ticket, landed, Times())
    assert rounds._wanted.find(seats, "ngram", 30) == before


def test_prompts_are_compiled_for_all_contexts_and_drafters(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dummies are read with each drafter that reads along, and with each bound of contexts that is asked for."""
    rounds, read = pair(device, "model")[0], []

    def note(chunks: list[Chunk], drafter: object, held: object, context: int, *, edits: bool) -> None:
        read.append((len(chunks), chunks[0].count, drafter is None, context))

    monkeypatch.setattr(rounds, "_read", note)
    rounds._read_dummies(32, [70, 40])
    for plain in (True, False):
        for context in (70, 40):
            assert (1, 32, plain, context) in read
            assert (2, 16, plain, context) in read


@pytest.mark.skipif(not ON_GPU, reason="only a GPU copies later than it is asked to")
def test_uploads_arrive_as_they_were_though_the_device_is_late(device: torch.device) -> None:
    upload = Upload(device)
    torch.cuda._sleep(200_000_000)  # cycles, about 0.1 s
    got = [upload(np.full(50_000, i)) for i in range(40)]
    assert [(int(each.min()), int(each.max())) for each in got] == [(i, i) for i in range(40)]
