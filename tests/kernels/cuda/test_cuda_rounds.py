"""Rounds on a device, launched without an engine: buckets, and the same outcomes as the portable rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.drafters.eagle.on_device import EagleOnDevice
from paceline.drafters.medusa import MedusaOnDevice
from paceline.drafters.model import ModelOnDevice
from paceline.drafters.ngram import LookupOnDevice
from paceline.engine.chain_rules import judge_chains
from paceline.kernels.cuda.tiles import FEW_ROWS
from paceline.kernels.edit_reference import Edits
from paceline.rules import Rule
from paceline.runner.forwards.cuda import CudaDecoder, CudaForward, new_kv, padded_rows
from paceline.runner.forwards.torch import TorchForward
from paceline.runner.heads.cuda import CudaHead
from paceline.runner.heads.medusa import TorchMedusa
from paceline.runner.heads.torch import TorchHead
from paceline.runner.rounds import cuda_chunks
from paceline.runner.rounds.cuda import OFFERED, CudaRounds, Ticket, _parts
from paceline.runner.rounds.cuda_chunks import ReadChunks
from paceline.runner.rounds.parameter_kernels import compile_parameters
from paceline.runner.rounds.portable import PortableRounds
from paceline.runner.rounds.protocol import Chunk, DeviceDrafter, Landed, Offer, Rounds, Seat, Times
from paceline.sampling.sampler import Sampler
from paceline.types import SamplingParams
from tests.heads import random_eagle, random_medusa
from tests.kernels.cuda.conftest import ON_GPU
from tests.kernels.tiny_forward import PLAIN, floats, random_weights
from tests.odd_drafters import AgainOnDevice, TreesOnDevice

LANES, PAGES = 9, 40
TAPS = (0, 1, 1)
AGAIN = {"again": AgainOnDevice(), "again-half": AgainOnDevice(finds_fewer=True)}  # from outside
OPTIONS = {"lanes": LANES, "max_context": 2000, "max_draft": 8}


def weights(noise: float = 0.0) -> dict[str, Any]:
    own, other = (floats(random_weights(PLAIN, "int8", seed=seed)) for seed in (0, 1))
    return {name: weight + noise * other[name] for name, weight in own.items()}


def forward(device: torch.device, noise: float = 0.0, kv: Any = None) -> CudaForward:
    decoder = CudaDecoder(PLAIN, weights(noise), max_context=64, dtype=torch.float32, device=device, pdl=ON_GPU)
    return CudaForward(decoder, kv or new_kv(PLAIN, num_pages=PAGES, dtype=torch.float32, device=device))


def heads(
    target: CudaForward, oracle: TorchForward, *, branches: int = 1, **options: Any
) -> tuple[EagleOnDevice, EagleOnDevice]:
    made = random_eagle(PLAIN, taps=TAPS, draft_vocab=60, **options)
    head = CudaHead(replace(made, weights=dict(made.weights)), target.decoder, max_context=64)
    head.new_kv(PAGES)
    other = TorchHead(made, oracle, num_pages=PAGES + 1)  # with a page for padding, as a device has one
    least = 0.2 if branches == 1 else 0.02
    limits = {"max_draft": 5, "min_confidence": least, "branches": branches}
    return tuple(EagleOnDevice(each, taps=TAPS, **limits) for each in (head, other))


def pair(device: torch.device, drafter: str | None = None, **options: Any) -> tuple[CudaRounds, PortableRounds]:
    target, oracle = forward(device), TorchForward(PLAIN, weights(), num_pages=PAGES, taps=(0, 1))
    mine: dict[str, DeviceDrafter] = {}
    other: dict[str, DeviceDrafter] = {}
    if drafter == "ngram":
        mine["ngram"] = other["ngram"] = LookupOnDevice()
    elif drafter == "trees":
        mine["trees"] = other["trees"] = AGAIN["again"]  # until the texts are known
    elif drafter == "eagle":
        mine["eagle"], other["eagle"] = heads(target, oracle, **options)
    elif drafter == "medusa":
        mine["medusa"], other["medusa"] = (
            MedusaOnDevice(TorchMedusa(random_medusa(PLAIN)), tap=1, min_confidence=0.0) for _ in range(2)
        )
    elif drafter in AGAIN:
        mine[drafter] = other[drafter] = AGAIN[drafter]
    elif drafter is not None:
        shares = drafter == "self"
        mine[drafter] = ModelOnDevice(forward(device, 0.05, target.kv if shares else None), shares_kv=shares)
        copy = TorchForward(PLAIN, weights(0.05), num_pages=PAGES)
        if shares:
            copy.kv, copy.backend = oracle.kv, oracle.backend
        other[drafter] = ModelOnDevice(copy, shares_kv=shares)
    return (
        CudaRounds(target, drafters=mine, graphs=ON_GPU, **OPTIONS),
        PortableRounds(oracle, drafters=other, **OPTIONS),
    )


def enter(rounds: Rounds, lane: int, tokens: Sequence[int], **params: Any) -> None:
    sampler = Sampler(SamplingParams.of(**params), seed=7 + lane, vocab_size=PLAIN.vocab_size, eos_ids=())
    sampler.see_prompt(tokens)
    rounds.write(lane, np.array(tokens), sampler)
    rounds.set_pages(lane, 0, range(4 * lane, 4 * lane + 4))


Step = tuple[list[Landed | None], list[Landed]]


def both(made: Sequence[Rounds], chunks: Sequence[Chunk], seats: Sequence[Seat], drafter: str | None = None) -> Step:
    mine, other = (each.collect(each.launch(chunks, seats, drafter=drafter, context=30))[:2] for each in made)
    assert mine == other
    return mine


@pytest.mark.parametrize(("drafter", "longest"), [("model", 2), ("self", 2), ("ngram", 3)])
def test_drafts_as_those_of_portable_rounds(drafter: str, longest: int, device: torch.device) -> None:
    """A lane with all filters and a greedy one, whose limits differ; then the greedy one alone."""
    made = pair(device, drafter)
    assert [*made[0].readers] == [*made[1].readers] == (["model"] if drafter == "model" else [])
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
        *([] if ON_GPU else [("medusa", {})]),
    ],
    ids=str,
)
@pytest.mark.slow
def test_heads_as_in_portable_rounds(drafter: str, options: dict[str, Any], device: torch.device) -> None:
    """Prompts in one chunk and in two, drafts of several lengths, plain steps between them, and a step whose states are
    not held."""
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
    assert both(made, [], [Seat(2, 3)], drafter)[1][0].drafted != ()


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
    assert made[0]._found[OFFERED] < 1.0
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
    shapes = [(bucket.seats, bucket.rows, bucket.draft, bucket.filters) for bucket in made[0]._graphs._eager]
    assert shapes == [(9, 9, 0, False), (8, 8, 0, False)]
    assert made[0]._state.lengths[made[0]._state.dummy] == 1


def test_seconds_are_of_a_drafter(device: torch.device) -> None:
    """And of a plain round whoever asks."""
    rounds, _ = pair(device, "ngram")
    seats = {0: [Seat(0, 0)], 3: [Seat(0, 3)]}
    for lane, (draft, drafter, took) in enumerate([(0, None, 1.0), (3, "ngram", 2.0), (3, "other", 3.0)]):
        bucket = replace(rounds._bucket(seats[draft], "ngram", 30), drafter=drafter, draft=draft)
        ticket = Ticket([], seats[draft] * (8 + lane), bucket, ReadChunks(), None, None, None, None)
        rounds._learn(ticket, [Landed((), (), (1,))] * (8 + lane), Times(step=took))
    assert [rounds.round_seconds(8, 0, name) for name in ("ngram", "other")] == [1.0, 1.0]
    assert [rounds.round_seconds(8, 3, name) for name in ("ngram", "other")] == [2.0, 3.0]
    assert rounds.round_seconds(8, 3, "third") is None
    assert rounds.round_seconds(20, 3, "ngram") is None  # too far from what was measured
    assert rounds.round_seconds(10, 3, "ngram") == 2.0
    last = Ticket([], seats[3] * 10, bucket, ReadChunks(), None, None, None, None)
    rounds._learn(last, [Landed((), (), (1,))] * 10, Times(step=4.0))
    assert rounds.round_seconds(10, 3, "other") == pytest.approx(3.1)
    rounds._learn(replace(last, typical=False), [Landed((), (), (1,))] * 10, Times(step=90.0))
    assert rounds.round_seconds(10, 3, "other") == pytest.approx(3.1), "launches one by one are not what rounds take"


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
    enter(rounds, 3, [1, 2], top_k=5)
    seats = [Seat(lane, 8 - lane // 5) for lane in range(LANES)]
    bucket = rounds._bucket(seats, "ngram", 700)
    assert bucket.seats + 5 * 8 + 4 * 7 <= bucket.rows <= bucket.seats * 9
    assert (bucket.draft, bucket.drafter, bucket.filters) == (8, "ngram", True)
    assert bucket == rounds._bucket(seats, "ngram", 690)
    rounds._found["ngram"] = 0.1
    assert rounds._bucket(seats, "ngram", 700).rows < bucket.rows
    assert not rounds._bucket(seats[:3], "ngram", 700).filters
    plain = rounds._bucket([Seat(0, 0)], "ngram", 3)
    assert (plain.seats, plain.rows, plain.draft, plain.drafter) == (1, 1, 0, None)


def test_prompts_are_padded_to_few_lengths() -> None:
    assert [padded_rows(rows) for rows in range(1, FEW_ROWS + 1)] == [*range(1, FEW_ROWS + 1)]
    lengths = {rows: padded_rows(rows) for rows in range(FEW_ROWS + 1, 8193)}
    assert all(rows <= padded <= max(1.25 * rows, rows + FEW_ROWS) for rows, padded in lengths.items())
    assert len({*lengths.values()}) < 40


def test_parts_of_a_step() -> None:
    assert _parts(0.5, [1_000, 2_001_000, 5_001_000, 5_001_000]) == Times(step=0.5, draft=0.002, verify=0.003)


def test_rows_do_not_shrink_while_everything_is_found(device: torch.device) -> None:
    """Limits differ, and all that they allow is drafted: there must be room for it the next time, too."""
    rounds, _ = pair(device, "ngram")
    seats = [Seat(0, 8), *(Seat(lane, 2) for lane in (1, 2, 3))]
    before = rounds._bucket(seats, "ngram", 30)
    for _ in range(9):
        bucket = rounds._bucket(seats, "ngram", 30)
        ticket = Ticket([], seats, bucket, ReadChunks(), None, None, None, None)
        landed = [Landed((), (1,) * seat.max_draft, (1,)) for seat in seats]
        rounds._learn(ticket, landed, Times())
    assert rounds._bucket(seats, "ngram", 30) == before


EDITED: Sequence[dict[str, Any]] = (
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0.9, "repetition_penalty": 1.5, "frequency_penalty": 0.6, "logprobs": 0},
    {"temperature": 0, "logit_bias": {3: 4.0, 9: -100.0}, "min_tokens": 3, "stop_ids": (4, 5, 6, 7)},
    {"temperature": 1.2, "allowed_tokens": tuple(range(2, 40, 3)), "top_k": 5, "presence_penalty": 1.0, "logprobs": 2},
)


def nearly(mine: Landed | None, other: Landed | None) -> bool:
    """True if both are the same up to the rounding of log-probabilities and states."""
    if mine is None or other is None:
        return mine is other
    for ours, theirs in zip((*mine.scores, *mine.prompt_scores), (*other.scores, *other.prompt_scores), strict=True):
        assert (ours.token, ours.rank, len(ours.top)) == (theirs.token, theirs.rank, len(theirs.top))
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [p for _, p in ours.top] == pytest.approx([p for _, p in theirs.top], abs=1e-4)
    if mine.states is not None and other.states is not None:
        torch.testing.assert_close(mine.states.float(), other.states.float(), rtol=1e-3, atol=1e-3)
    bare = {"scores": (), "prompt_scores": (), "states": None}
    return (mine.states is None) == (other.states is None) and mine._replace(**bare) == other._replace(**bare)


def both_nearly(
    made: Sequence[Rounds], chunks: Sequence[Chunk], seats: Sequence[Seat], drafter: str | None = None
) -> Step:
    mine, other = (each.collect(each.launch(chunks, seats, drafter=drafter, context=30))[:2] for each in made)
    for ours, theirs in zip((*mine[0], *mine[1]), (*other[0], *other[1]), strict=True):
        assert nearly(ours, theirs)
    return mine


@pytest.mark.parametrize("drafter", [None, "self"])
def test_every_parameter_as_by_portable_rounds(drafter: str | None, device: torch.device) -> None:
    """Penalties, bias and log-probabilities beside a plain lane, from the prompts on."""
    made = pair(device, drafter)
    for rounds in made:
        for lane, params in enumerate(EDITED):
            enter(rounds, lane, [5, 6, 7, 8, 5, 6 + lane], **params)
        enter(rounds, 4, [1, 2, 3], temperature=0)
    drawn, _ = both_nearly(made, [Chunk(lane, 0, 6, draws=True) for lane in range(4)], [], drafter)
    assert [len(landed.scores) for landed in drawn if landed] == [1, 1, 0, 1]
    both_nearly(made, [Chunk(4, 0, 2, draws=False)], [], drafter)
    seats = [Seat(lane, 1 if drafter else 0) for lane in (4, 0, 1, 2, 3)]
    for _ in range(1 if drafter else 2):
        _, landed = both_nearly(made, [], seats, drafter)
        assert [len(each.scores) for each in landed] == [
            0,
            *(len(each.tokens) for each in landed[1:3]),
            0,
            len(landed[4].tokens),
        ]
    graphs = made[0]._graphs
    assert [bucket.edits for bucket in (*graphs._eager, *graphs._recorded)] == [True]
    assert torch.equal(made[0]._state.marks.cpu(), made[1]._state.marks)


def test_prompts_are_scored_and_pooled(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several chunks, some of which only fill memory; logits are made for three rows at a time."""
    monkeypatch.setattr(cuda_chunks, "SCORED_ROWS", 3)
    made = pair(device)
    for rounds in made:
        for lane in range(3):
            enter(rounds, lane, [5, 6, 7, 8, 5, 6, 9, 1], temperature=0, logprobs=1 if lane == 1 else None)
    chunks = [
        Chunk(0, 0, 4, draws=False),
        Chunk(1, 0, 8, draws=True, scored=7, top=2),
        Chunk(2, 0, 5, draws=False, scored=5, states=5),
    ]
    first, second, third = both_nearly(made, chunks, [])[0]
    assert first is None
    assert second is not None
    assert [score.token for score in second.prompt_scores] == [6, 7, 8, 5, 6, 9, 1]
    assert len(second.scores) == len(second.tokens) == 1
    assert third is not None
    assert third.tokens == ()
    assert third.states is not None
    assert third.states.shape == (5, PLAIN.hidden_size)


def test_a_mask_decides_the_next_token(device: torch.device) -> None:
    made = pair(device)
    bits = np.zeros(-(-PLAIN.vocab_size // 32), dtype=np.uint32)
    bits[0] = 1 << 11 | 1 << 30
    for rounds in made:
        enter(rounds, 1, [5, 6, 7], temperature=0, logit_bias={0: 0.0})
        rounds.set_mask(1, bits)
        rounds._changes._add(rounds._state.edits, 1, 0, [Edits.MASKS])
    (landed,), _ = both(made, [Chunk(1, 0, 3, draws=True)], [])
    assert landed is not None
    assert landed.tokens[0] in (11, 30)
    _, (landed,) = both(made, [], [Seat(1, 0)])
    assert landed.tokens[0] in (11, 30)


@pytest.mark.parametrize("rules", [(Rule.REJECTION, Rule.THRESHOLD), (Rule.BLOCK, Rule.TYPICAL)])
def test_rules_as_by_portable_rounds(rules: tuple[Rule, Rule], device: torch.device) -> None:
    """Two seats of each rule beside coupled ones, with filters and edits, and drafts of different lengths."""
    made = pair(device, "self")
    for rounds in made:
        rounds.judge = judge_chains
        for lane, params in enumerate([{}, {"top_k": 9}, {"repetition_penalty": 1.4}, {"temperature": 0.7}]):
            enter(rounds, lane, [5, 6, 7, 8], **params)
    both(made, [Chunk(lane, 0, 3, draws=False) for lane in range(4)], [], "self")
    seats = [Seat(0, 2, rule=rules[0]), Seat(1, 1), Seat(2, 2, rule=rules[1], threshold=0.2), Seat(3, 1, rule=rules[0])]
    for _ in range(2 if ON_GPU else 1):
        _, landed = both(made, [], seats, "self")
    (bucket,) = (*made[0]._graphs._eager, *made[0]._graphs._recorded)
    assert (bucket.rules, bucket.judged, bucket.filters, bucket.eager) == (tuple(sorted(rules)), 4, True, False)
    assert [len(each.drafted) for each in landed] == [2, 1, 2, 1]


def test_kernels_of_parameters_need_no_tables(device: torch.device) -> None:
    """They are compiled at the start, when nobody may ever ask for them."""
    rounds, _ = pair(device)
    before = rounds._state.memory.clone()
    compile_parameters(rounds._state, vocab=PLAIN.vocab_size, pdl=ON_GPU)
    assert rounds._state.marks.shape[1] == 0
    assert torch.equal(rounds._state.memory, before)
