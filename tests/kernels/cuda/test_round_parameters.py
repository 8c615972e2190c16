"""Sampling parameters, log-probabilities, hidden states, masks and rules in rounds on a device, without an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from paceline.engine.draft_rules import judge_drafts
from paceline.kernels.edit_reference import Edits
from paceline.rules import Rule
from paceline.runner.rounds import cuda_chunks
from paceline.runner.rounds.cuda_round import CudaRound
from paceline.runner.rounds.parameter_kernels import compile_parameters
from paceline.runner.rounds.protocol import Chunk, Landed, Offer, Rounds, Seat
from paceline.sampling.words import pack
from tests.kernels.cuda.conftest import ON_GPU
from tests.kernels.cuda.round_pairs import (
    KEPT,
    Step,
    both,
    enter,
    pair,
)
from tests.kernels.tiny_forward import PLAIN
from tests.odd_drafters import TreesOnDevice

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
    for ours, theirs in ((mine.states, other.states), (mine.features, other.features)):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours.float(), theirs.float(), rtol=1e-3, atol=1e-3)
    bare = {"scores": (), "prompt_scores": (), "states": None, "features": None}
    return mine._replace(**bare) == other._replace(**bare)


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
    assert [(bucket.edits, bucket.scores) for bucket in (*graphs._eager, *graphs._recorded)] == [(True, 1 + 5)]
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


@pytest.mark.parametrize("drafter", [None, "eagle"])
def test_hidden_states_for_the_host(drafter: str | None, device: torch.device) -> None:
    """Those of committed rows, for the sequences that ask, beside a head that reads its own."""
    made, width = pair(device, drafter), len(KEPT) * PLAIN.hidden_size
    for rounds in made:
        for lane in range(3):
            enter(rounds, lane, [5, 6, 7, 8, 5, 6, 9 + (lane > 0)], temperature=0)
    reads = drafter is not None
    part = [Chunk(lane, 0, 4, draws=False, drafts=reads, tapped=lane > 0) for lane in range(3)]
    first, second, third = both_nearly(made, part, [], drafter)[0]
    assert first is None
    for landed in (second, third):
        assert landed is not None
        assert landed.tokens == ()
        assert landed.features is not None
        assert (landed.features.shape, landed.features.dtype) == ((4, width), torch.float32)
    whole = [Chunk(lane, 4, 3, draws=True, drafts=reads, tapped=lane > 0) for lane in range(3)]
    said = [landed.tokens[0] for landed in both_nearly(made, whole, [], drafter)[0] if landed]
    states = []
    for _ in range(2):
        other, each = both_nearly(made, [], [Seat(0, 0), Seat(1, 0, tapped=True)], drafter)[1]
        assert other.features is None
        assert each.features is not None
        said += each.tokens
        states.append(each.features)
    ahead = (*said[2:], (said[-1] + 1) % PLAIN.vocab_size)  # what its twin has said, then something wrong
    seats = [Seat(0, 3 if drafter else 0), Seat(2, 3, Offer(7, ahead), tapped=True)]
    other, each = both_nearly(made, [], seats, drafter)[1]
    assert other.features is None
    assert each.features is not None
    assert (each.accepted, len(each.features)) == (2, 3)
    torch.testing.assert_close(each.features[:2], torch.cat(states), rtol=1e-3, atol=1e-3)
    graphs = made[0]._graphs
    assert [bucket.tapped for bucket in (*graphs._eager, *graphs._recorded)] == [True, True]


def words(*tokens: int) -> np.ndarray:
    return pack(tokens, PLAIN.vocab_size)


class Busy:
    """An event that the device has not reached, until somebody waits for it."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Busy) -> float:
        return 1.0


def draw_with(
    rounds: Any, ticket: Any, masks: Mapping[int, Sequence[np.ndarray]], *, rows: Sequence[int] | None = None
) -> None:
    """Draw with masks by seat, for the rows of its only branch, or for `rows`."""
    drafts, sheet = rounds.drafts(ticket), rounds.sheet(ticket)
    for index, each in masks.items():
        sheet.put(drafts[index][0].rows if rows is None else rows, each)
    rounds.draw(ticket, [*masks])


@pytest.mark.parametrize("late", [False, True])
def test_masks_decide_every_row_and_seats_without_them_draw_nothing(
    late: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the device is busy, they wait for the next launch, or for somebody who waits for the step."""
    if late and ON_GPU:
        monkeypatch.setattr(torch.cuda.Event, "query", lambda self: False)
    made = pair(device, "self")
    if late and not ON_GPU:
        monkeypatch.setattr(made[0], "_mark", Busy)
        monkeypatch.setattr(CudaRound, "recorded", True)
    first, second = words(11, 30), words(12, 31)
    for rounds in made:
        for lane in range(3):
            enter(rounds, lane, [5, 6, 7], temperature=0, logit_bias={0: 0.0})
            rounds._changes._add(rounds._state.edits, lane, 0, [Edits.MASKS if lane < 2 else 0])
    chunks = [Chunk(lane, 0, 3, draws=True, mask=first if lane < 2 else None) for lane in range(3)]
    read, _ = both(made, chunks, [], "self")
    assert all(each is not None and each.tokens[0] in (11, 30) for each in read[:2])
    seats = [Seat(0, 2), Seat(1, 2), Seat(2, 1)]
    for turn in range(3 if ON_GPU else 1):
        lengths = made[0]._state.lengths.tolist()
        tickets = [rounds.launch([], seats, drafter="self", context=40, masked=[0, 1]) for rounds in made]
        drafts = [rounds.drafts(ticket) for rounds, ticket in zip(made, tickets, strict=True)]
        assert drafts[0] == drafts[1]
        [(drafted, rows)] = drafts[0][0]
        assert [*rows] == [0, 1, 2]
        only = [words(token) for token in drafted]  # the draft itself, then one of two
        for rounds, ticket in zip(made, tickets, strict=True):
            draw_with(rounds, ticket, {0: [*only, second]})
        assert (made[0]._late is tickets[0]) is (late and (turn > 0 or not ON_GPU))
        behind = [each.launch([], [Seat(2, 0)], drafter=None, context=40) for each in made]
        assert made[0]._late is None
        landed, same = (rounds.collect(ticket)[1] for rounds, ticket in zip(made, tickets, strict=True))
        assert landed == same
        assert landed[0].accepted == 2
        assert landed[0].tokens[2] in (12, 31)
        assert not landed[1].tokens  # void
        assert made[0]._state.lengths.tolist()[:2] == [lengths[0] + 3, lengths[1]]
        landed, same = (rounds.collect(ticket)[1] for rounds, ticket in zip(made, behind, strict=True))
        assert landed == same
    tickets = [rounds.launch([], seats[1:], drafter="self", context=40, masked=[0]) for rounds in made]
    for rounds, ticket in zip(made, tickets, strict=True):
        draw_with(rounds, ticket, {0: [first] * 3})
    landed, same = (rounds.collect(ticket)[1] for rounds, ticket in zip(made, tickets, strict=True))
    assert landed == same
    assert landed[0].tokens[0] in (11, 30)


def test_masks_of_trees_follow_their_paths(device: torch.device) -> None:
    """A mask for each row leads along one path, beside a seat without masks."""
    made, text = pair(device, "trees"), [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    for rounds in made:
        rounds.drafters["trees"] = TreesOnDevice([text], nodes=5, vocab_size=PLAIN.vocab_size)
        for lane in range(2):
            enter(rounds, lane, text[:5], temperature=0, logit_bias={0: 0.0})
        rounds._changes._add(rounds._state.edits, 0, 0, [Edits.MASKS])
    both(made, [Chunk(lane, 0, 4, draws=False) for lane in range(2)], [], "trees")
    for turn in range(3 if ON_GPU else 1):
        seats = [Seat(1, 4), Seat(0, 5)]
        tickets = [each.launch([], seats, drafter="trees", context=30, masked=[1]) for each in made]
        (drafts, other) = (each.drafts(ticket) for each, ticket in zip(made, tickets, strict=True))
        assert drafts == other
        assert turn or len(drafts[1]) > 1, "the known text branches; the one that is drawn after it need not"
        deepest, rows = max(drafts[1], key=lambda branch: len(branch.tokens))
        along = [words(token) for token in (*deepest, 3)]
        for each, ticket in zip(made, tickets, strict=True):
            draw_with(each, ticket, {1: along}, rows=rows)
        landed, same = (each.collect(ticket)[1] for each, ticket in zip(made, tickets, strict=True))
        assert landed == same
        assert landed[1].tokens == (*deepest, 3)


@pytest.mark.parametrize("rules", [(Rule.REJECTION, Rule.CONFIDENCE), (Rule.BLOCK, Rule.TYPICAL)])
def test_rules_as_by_portable_rounds(rules: tuple[Rule, Rule], device: torch.device) -> None:
    """Two seats of each rule beside coupled ones, with filters and edits, and drafts of different lengths."""
    made = pair(device, "self")
    for rounds in made:
        rounds.judge = judge_drafts
        for lane, params in enumerate([{}, {"top_k": 9}, {"repetition_penalty": 1.4}, {"temperature": 0.7}]):
            enter(rounds, lane, [5, 6, 7, 8], **params)
    both(made, [Chunk(lane, 0, 3, draws=False) for lane in range(4)], [], "self")
    seats = [Seat(0, 2, rule=rules[0]), Seat(1, 1), Seat(2, 2, rule=rules[1], threshold=0.2), Seat(3, 1, rule=rules[0])]
    for _ in range(2 if ON_GPU else 1):
        _, landed = both(made, [], seats, "self")
    (bucket,) = (*made[0]._graphs._eager, *made[0]._graphs._recorded)
    assert (bucket.rules, bucket.judged, bucket.eager) == (tuple(sorted(rules)), 4, False)
    assert [len(each.drafted) for each in landed] == [2, 1, 2, 1]


@pytest.mark.parametrize("drafter", ["medusa", "eagle"])
def test_rules_judge_trees_as_by_portable_rounds(drafter: str, device: torch.device) -> None:
    made = pair(device, drafter, **({"branches": 3} if drafter == "eagle" else {}))
    for rounds in made:
        rounds.judge = judge_drafts
        for lane in range(3):
            enter(rounds, lane, [5, 6, 7, 8], temperature=0.7)
    both(made, [Chunk(lane, 0, 4, draws=True, drafts=True) for lane in range(3)], [], drafter)
    rules = [{"rule": Rule.THRESHOLD, "threshold": 0.001}, {"rule": Rule.TYPICAL, "threshold": 0.3}, {}]
    _, landed = both(made, [], [Seat(lane, 5, **rule) for lane, rule in enumerate(rules)], drafter)
    assert landed[0].path, "a token of any probability was refused"
    assert [*landed[0].parents] != [*range(-1, len(landed[0].drafted) - 1)], "no tree"


def test_kernels_of_parameters_need_no_tables(device: torch.device) -> None:
    """They are compiled at the start, when nobody may ever ask for them."""
    rounds, _ = pair(device)
    before = rounds._state.memory.clone()
    compile_parameters(rounds._state, vocab=PLAIN.vocab_size, heads=(60,), trees=True, pdl=ON_GPU)
    assert rounds._state.marks.shape[1] == 0
    assert torch.equal(rounds._state.memory, before)
