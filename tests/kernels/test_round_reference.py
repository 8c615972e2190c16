"""The operations of a round in plain torch, against their definitions: Sampler, NgramDrafter, the coupled rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.accept.coupled import accept_coupled
from paceline.draft import Draft
from paceline.drafters.base import Ask
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.prediction import Prediction, PredictionDrafter, Trail
from paceline.kernels import round_reference as rounds
from paceline.kernels.lookup_reference import lookup
from paceline.kernels.noise import pick
from paceline.runner.rounds.device_state import DeviceState
from paceline.sampling.sampler import Sampler, Stream, mix
from paceline.types import SamplingParams

SCRATCH = 99
PARAMS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 2.0, "top_k": 40, "top_p": 0.5, "min_p": 0.01},
    {"temperature": 1.0, "top_k": 10000, "top_p": 1e-6},
]


def lanes(count: int, *, width: int = 40) -> DeviceState:
    return DeviceState(lanes=count, width=width, scratch_page=SCRATCH, device="cpu")


def ask_sampling(state: DeviceState, lane: int, *, seed: int, **params: Any) -> Sampler:
    """Write sampling parameters into a lane, and return a Sampler with the same parameters."""
    wanted = SamplingParams(**params)
    state.inverse_temperature[lane] = 0.0 if wanted.greedy else 1.0 / wanted.temperature
    state.top_k[lane], state.top_p[lane], state.min_p[lane] = wanted.top_k, wanted.top_p, wanted.min_p
    state.seed[lane] = int(np.array(seed, dtype=np.uint64).view(np.int64))
    return Sampler(wanted, seed=seed, vocab_size=1, eos_ids=())


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# ── draw ──


@pytest.mark.parametrize("vocab", [1, 7, 1000])
def test_draws_as_sampling_does(vocab: int) -> None:
    rows, random = 64, torch.Generator().manual_seed(vocab)
    state = lanes(len(PARAMS))
    samplers = [ask_sampling(state, i, seed=2**64 - 1 - 977 * i, **params) for i, params in enumerate(PARAMS)]
    logits = 3 * torch.randn((rows, vocab), generator=random)
    owners = torch.randint(0, len(PARAMS), (rows,), generator=random, dtype=torch.int32)
    positions = torch.randint(0, 131072, (rows,), generator=random, dtype=torch.int32)
    out = torch.zeros(rows, dtype=torch.int32)
    rounds.draw(logits, state, lanes=owners, positions=positions, offset=1, out=out)
    for row, (lane, position) in enumerate(zip(owners.tolist(), positions.tolist(), strict=True)):
        drawn = samplers[lane].draw(logits[row : row + 1], np.array([position + 1]), pick)
        assert out[row] == drawn[0], (row, PARAMS[lane])


@pytest.mark.parametrize("params", PARAMS[2:], ids=str)
def test_filters_leave_what_sampling_leaves(params: dict[str, Any]) -> None:
    state = lanes(1)
    sampler = ask_sampling(state, 0, seed=1, **params)
    logits = 2 * torch.randn((32, 500), generator=torch.Generator().manual_seed(3))
    logits[1] = logits[1].round()  # ties
    logits[2, 5:] = -torch.inf
    scaled = logits * state.inverse_temperature[0]
    kept = scaled >= rounds.filter_floor(scaled, state, torch.zeros(32, dtype=torch.int64))
    assert torch.equal(kept & logits.isfinite(), sampler.shape(logits).isfinite())


def test_the_hash_is_that_of_sampling() -> None:
    seeds, positions = [0, 1, 2**63, 2**64 - 1], np.array([0, 1, 77, 131071])
    for stream in Stream:
        for seed in seeds:
            bits = rounds.mix(
                torch.tensor(np.array(seed, dtype=np.uint64).view(np.int64)), torch.tensor(positions), stream
            )
            assert np.array_equal(bits.numpy().view(np.uint64), mix(seed, positions, stream))


def test_odd_logits() -> None:
    """Ties go to the lowest token; rows that are all -inf or have NaN give a token of the vocabulary."""
    state = lanes(2)
    ask_sampling(state, 1, seed=1, temperature=1.0, top_p=0.9, top_k=3, min_p=0.1)
    row = torch.tensor([1.0, 4.0, 4.0, torch.nan, -torch.inf])
    logits = torch.stack([row, row, torch.full((5,), -torch.inf), torch.full((5,), torch.nan)] * 2)
    out = torch.zeros(8, dtype=torch.int32)
    rounds.draw(logits, state, lanes=ints(0, 0, 0, 0, 1, 1, 1, 1), out=out)
    assert out[:4].tolist() == [1, 1, 0, 0]
    assert set(out[4:6].tolist()) <= {1, 2}
    assert out[6:].tolist() == [0, 0]


def test_a_drawn_token_is_pushed_to_its_position() -> None:
    state = lanes(2, width=8)
    state.lengths[:2] = ints(3, 7)
    logits = torch.eye(5)[[2, 4, 3]]
    out = torch.zeros(3, dtype=torch.int32)
    rounds.draw(logits, state, lanes=ints(0, 1, 2), offset=1, out=out, push=True)
    assert out.tolist() == [2, 4, 3]
    assert state.tokens[0].tolist() == [0, 0, 0, 0, 2, 0, 0, 0]
    assert state.tokens[1].tolist() == [0] * 8  # past the width
    rounds.push(state, seats=ints(1, 0), tokens=ints(6, 7), offset=0)
    assert state.tokens[:2, 3:].tolist() == [[7, 2, 0, 0, 0], [0, 0, 0, 0, 6]]


# ── layout ──


def rows_of(state: DeviceState, *, seats: Tensor, counts: Tensor, first: int, rows: int) -> dict[str, Tensor]:
    names = ("tokens", "positions", "slots", "owners")
    out = {name: torch.full((rows,), -7, dtype=torch.int32) for name in names}
    out["row_starts"] = torch.full((len(seats) + 1,), -7, dtype=torch.int32)
    rounds.layout(state, seats=seats, counts=counts, first=first, **out)
    return out


def test_layout_of_a_verification() -> None:
    state = lanes(3)
    state.tokens[:3] = torch.arange(120, dtype=torch.int32).view(3, 40)
    state.pages[:3] = torch.arange(9, dtype=torch.int32).view(3, 3)
    state.lengths[:3] = ints(5, 16, 1)
    counts = ints(3, 1, 2, 1)
    out = rows_of(state, seats=ints(1, 2, 0, 3), counts=counts, first=-1, rows=9)
    assert counts.tolist() == [3, 1, 2, 1]
    assert out["row_starts"].tolist() == [0, 3, 4, 6, 7]
    assert out["positions"].tolist() == [15, 16, 17, 0, 4, 5, 0, 0, 0]
    assert out["owners"].tolist() == [1, 1, 1, 2, 0, 0, 3, 3, 3]
    assert out["tokens"].tolist() == [55, 56, 57, 80, 4, 5, 0, 0, 0]
    assert out["slots"].tolist() == [3 * 16 + 15, 4 * 16, 4 * 16 + 1, 6 * 16, 4, 5, *[SCRATCH * 16] * 3]


def test_layout_cuts_to_what_fits() -> None:
    state = lanes(4)
    state.lengths[:4] = 9
    counts = ints(4, 5, 3, 2)
    out = rows_of(state, seats=ints(0, 1, 2, 3), counts=counts, first=-1, rows=9)
    assert counts.tolist() == [4, 3, 1, 1]
    assert out["row_starts"].tolist() == [0, 4, 7, 8, 9]
    counts = ints(4, 5, 3, 2)
    rows_of(state, seats=ints(0, 1, 2, 3), counts=counts, first=-1, rows=4)
    assert counts.tolist() == [1, 1, 1, 1]


def test_layout_of_a_drafters_first_pass() -> None:
    """Two rows a seat; a sequence of one token has it twice."""
    state = lanes(2)
    state.lengths[:2] = ints(1, 6)
    out = rows_of(state, seats=ints(0, 1), counts=ints(2, 2), first=-2, rows=4)
    assert out["positions"].tolist() == [0, 0, 4, 5]


# ── accept ──


def drafted_lanes(random: torch.Generator, seats: int, longest: int) -> tuple[DeviceState, Tensor, Tensor, Tensor]:
    """A state with drafts behind its tokens, the order of its lanes, their row_starts, and what the target draws."""
    state = lanes(seats)
    state.tokens.copy_(torch.randint(0, 2, state.tokens.shape, generator=random))
    state.lengths[:seats] = torch.randint(1, 30, (seats,), generator=random).int()
    state.seed.copy_(torch.randint(-(2**63), 2**63 - 1, (seats + 1,), generator=random))
    order = torch.randperm(seats, generator=random).int()
    row_starts = torch.zeros(seats + 1, dtype=torch.int32)
    row_starts[1:] = torch.randint(1, longest + 2, (seats,), generator=random).cumsum(0)
    targets = torch.randint(0, 2, (seats * (longest + 1),), generator=random, dtype=torch.int32)
    return state, order, row_starts, targets


@pytest.mark.parametrize("seed", range(5))
def test_accepts_as_the_coupled_rule_does(seed: int) -> None:
    state, seats, row_starts, targets = drafted_lanes(torch.Generator().manual_seed(seed), 9, 4)
    tokens, lengths = state.tokens.clone(), state.lengths.clone()
    out = torch.full((9, 12), -7, dtype=torch.int32)
    rounds.accept(state, seats=seats, row_starts=row_starts, targets=targets, out=out)
    for b, lane in enumerate(seats.tolist()):
        start, stop = row_starts[b : b + 2].tolist()
        n, length = stop - start, int(lengths[lane])
        draft = tokens[lane, length : length + n - 1].tolist()
        verdict = accept_coupled(Draft(tokens=tuple(draft)), targets[start:stop].tolist())
        accepted = len(verdict.path)
        new = [*draft[:accepted], verdict.token]
        pad = [0] * (4 - accepted)
        assert out[b].tolist() == [
            *(accepted, n - 1, *new, *pad),
            *(*draft, *[0] * (5 - n), length + accepted + 1),
        ]
        assert state.lengths[lane] == length + accepted + 1
        assert state.tokens[lane, length : length + accepted + 1].tolist() == new
        assert torch.equal(state.tokens[lane, :length], tokens[lane, :length])


def test_seats_of_the_dummy_change_nothing() -> None:
    state, seats, row_starts, targets = drafted_lanes(torch.Generator().manual_seed(1), 3, 2)
    seats[1:] = state.dummy
    before = state.tokens.clone()
    out = torch.full((3, 8), -7, dtype=torch.int32)
    rounds.accept(state, seats=seats, row_starts=row_starts, targets=targets, out=out)
    assert out[1:].count_nonzero() == 0
    assert torch.equal(state.tokens[state.dummy], before[state.dummy])
    assert state.lengths[state.dummy] == 1


def test_the_end_of_a_prompt() -> None:
    state = lanes(2)
    state.lengths[:2] = ints(4, 5)
    out = torch.full((2, 6), -7, dtype=torch.int32)
    rounds.accept(state, seats=ints(1, 0), roots=ints(3, 1), targets=ints(10, 11, 12, 13), out=out)
    assert out.tolist() == [[0, 0, 13, 0, 0, 6], [0, 0, 11, 0, 0, 5]]
    assert state.tokens[0, 4] == 11
    assert state.tokens[1, 5] == 13


def test_synthetic_acceptance_has_its_rate() -> None:
    state, seats, row_starts, targets = drafted_lanes(torch.Generator().manual_seed(1), 2000, 4)
    row_starts.copy_(torch.arange(2001) * 5)
    guess = state.tokens.clone()
    lengths = state.lengths.clone()
    out = torch.zeros((2000, 12), dtype=torch.int32)
    rounds.accept(state, seats=seats, row_starts=row_starts, targets=targets, out=out, synthetic_acceptance=0.8)
    wanted = sum(0.8**i for i in range(1, 5))  # 2.36 of 4
    assert abs(out[:, 0].float().mean() - wanted) < 0.15  # its standard error is 0.036
    whole = seats[out[:, 0] == 4].long()
    at = lengths[whole].long()
    assert torch.equal(state.tokens[whole, at + 3], guess[whole, at + 3])  # drafted tokens, right or wrong


# ── lookup ──


@pytest.mark.parametrize(("least", "most"), [(1, 1), (1, 3), (2, 4), (3, 6)])
def test_looks_up_as_the_drafter_does(least: int, most: int) -> None:
    random, seats = torch.Generator().manual_seed(least * 10 + most), 60
    state = lanes(seats, width=64)
    state.tokens.copy_(torch.randint(0, 3, state.tokens.shape, generator=random))
    state.lengths[:seats] = torch.randint(1, 50, (seats,), generator=random).int()
    before = state.tokens.clone()
    limits = torch.randint(0, 9, (seats,), generator=random, dtype=torch.int32)
    found = torch.full((seats,), -7, dtype=torch.int32)
    order = torch.randperm(seats, generator=random).int()
    lookup(state, seats=order, limits=limits, min_ngram=least, max_ngram=most, found=found)
    drafter = NgramDrafter(min_ngram=least, max_ngram=most)
    for b, lane in enumerate(order.tolist()):
        length = int(state.lengths[lane])
        draft = _drafted(drafter, lane, before[lane, :length].numpy(), int(limits[b]))
        assert int(found[b]) == len(draft)
        assert state.tokens[lane, length : length + len(draft)].tolist() == draft
        assert torch.equal(state.tokens[lane, :length], before[lane, :length])
        assert torch.equal(state.tokens[lane, length + len(draft) :], before[lane, length + len(draft) :])


@pytest.mark.parametrize("alphabet", [3, 30])
def test_looks_into_predictions_as_the_drafter_does(alphabet: int) -> None:
    """Answers that follow their prediction with edits, one or a few tokens a round, from their first token on."""
    random, seats, width = torch.Generator().manual_seed(alphabet), 12, 90
    state = DeviceState(lanes=seats, width=width, scratch_page=SCRATCH, device="cpu", predicts=True)
    texts = torch.randint(0, alphabet, (seats, 40), generator=random)
    order, found = torch.arange(seats, dtype=torch.int32), torch.zeros(seats, dtype=torch.int32)
    drafter, drafted = PredictionDrafter(), 0
    sampler = Sampler(SamplingParams(), seed=0, vocab_size=alphabet, eos_ids=())
    answers, trails = [], []
    for lane, text in enumerate(texts.tolist()):
        prompt = torch.randint(0, alphabet, (7,), generator=random).tolist()
        answers.append([*prompt, *_edited(text, alphabet, random)])
        trails.append(Trail(Prediction(text), prompt))
        state.predicted[lane, :40], state.predicted_lengths[lane], state.drift[lane] = texts[lane], 40, -7
        drafter.start(lane, 0, np.array(prompt))
        trails[lane].advance(answers[lane][7:8])
    for length in range(8, min(map(len, answers))):
        for lane in range(seats):
            state.tokens[lane, :length] = torch.tensor(answers[lane][:length])
        state.lengths[:seats] = length
        limits = torch.full((seats,), 5, dtype=torch.int32)
        lookup(state, seats=order, limits=limits, min_ngram=1, max_ngram=6, found=found, predicted=True)
        for lane, trail in enumerate(trails):
            tokens = np.array(answers[lane][:length])
            ask = Ask(lane, 0, tokens, 5, sampler, predicted=trail.ahead(5), matched=trail.matched)
            [draft] = drafter.propose([ask])
            assert state.tokens[lane, length : length + int(found[lane])].tolist() == [*draft.tokens]
            drafted += trail.leads(draft.tokens)
            trail.advance(answers[lane][length : length + 1])
    assert drafted > 100


def _edited(text: list[int], alphabet: int, random: torch.Generator) -> list[int]:
    """Leave out some tokens, insert some, and replace some."""
    kinds = torch.randint(0, 12, (len(text),), generator=random).tolist()
    new = torch.randint(0, alphabet, (len(text),), generator=random).tolist()
    edits = {0: lambda token, other: [], 1: lambda token, other: [token, other], 2: lambda token, other: [other]}
    usual = [edits.get(kind, lambda token, other: [token])(*pair) for kind, *pair in zip(kinds, text, new, strict=True)]
    return [token for piece in usual for token in piece]


def _drafted(drafter: NgramDrafter, key: int, tokens: np.ndarray, limit: int) -> list[int]:
    drafter.start(key, 0, tokens)
    sampler = Sampler(SamplingParams(), seed=0, vocab_size=3, eos_ids=())
    return list(drafter.propose([Ask(key=key, lane=0, tokens=tokens, max_draft=limit, sampler=sampler)])[0].tokens)
