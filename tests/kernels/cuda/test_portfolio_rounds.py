"""Rounds of a portfolio as in portable rounds: a network drafts, and a copy takes its place where the text repeats."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.drafters.eagle import on_device
from paceline.models.block_config import Markov
from paceline.runner.rounds.cuda_chunks import ReadChunks
from paceline.runner.rounds.cuda_ticket import Ticket
from paceline.runner.rounds.protocol import Chunk, Landed, Match, Offer, Seat, Times
from tests.kernels.cuda.conftest import ON_GPU
from tests.kernels.cuda.round_pairs import both, enter, pair

TEXT = [5, 6, 7, 8, 9, 5, 6, 7]  # three tokens at its end stand in it already, and 8, 9, 5, … follow them
NEVER = 63  # tokens of a match that is not there


def begin(made: tuple[Any, Any]) -> None:
    """Two lanes, of which the first repeats itself."""
    for rounds in made:
        enter(rounds, 2, TEXT, temperature=0)
        enter(rounds, 0, [1, 2, 3, 4], temperature=0.8, top_k=40)
    chunks = [Chunk(2, 0, len(TEXT) - 1, draws=False, drafts=True), Chunk(0, 0, 3, draws=False, drafts=True)]
    both(made, chunks, [], "portfolio")


def drawn(made: tuple[Any, Any]) -> None:
    """The same, with a first token after each prompt: a head then has states to begin with."""
    for rounds in made:
        enter(rounds, 2, TEXT, temperature=0)
        enter(rounds, 0, [1, 2, 3, 4], temperature=0.8, top_k=40)
    both(made, [Chunk(lane, 0, count, draws=True, drafts=True) for lane, count in ((2, 8), (0, 4))], [], "portfolio")


@pytest.mark.parametrize("drafter", ["model", "parallel", "self"])
def test_copies_beside_a_model(drafter: str, device: torch.device) -> None:
    """The copy of one seat, of which the model has read what it reads of its own drafts, and a draft of the other."""
    made = pair(device, drafter, portfolio=True)
    assert ("portfolio" in made[0].readers) == (drafter != "self")
    begin(made)
    _, (copied, other) = both(made, [], [Seat(2, 3, max_copy=3, sure=3), Seat(0, 2, max_copy=2, sure=3)], "portfolio")
    assert copied.drafted == (8, 9, 5)
    assert copied.match == Match(size=3, end=3, drafted=True, copied=True)
    assert len(other.drafted) == 2
    assert other.match is not None
    assert not other.match.copied
    for sure in (NEVER, 2, 2):
        both(made, [], [Seat(2, 3, max_copy=3, sure=sure), Seat(0, 2, max_copy=1, sure=sure)], "portfolio")


def test_who_is_not_looked_at_gets_no_copy(device: torch.device) -> None:
    """A bar that the match does not reach, none, and a seat for which nobody looks."""
    made = pair(device, "self", portfolio=True)
    begin(made)
    for seat, match in (
        (Seat(2, 2, max_copy=2, sure=4), Match(3, 3, True, False)),
        (Seat(2, 2, max_copy=2), None),
        (Seat(2, 2, sure=2), None),
    ):
        _, (landed,) = both(made, [], [seat], "portfolio")
        assert landed.match is None or not landed.match.copied
        assert match is None or landed.match == match
    assert made[0]._wanted.find([Seat(2, 2)], "portfolio", 30).copies == 0


def test_an_offer_goes_before_a_copy(device: torch.device) -> None:
    """And nobody takes it for one, whether it fits the text or not."""
    made = pair(device, "self", portfolio=True)
    begin(made)
    for offer, drafted in ((Offer(len(TEXT), (1, 2)), (1, 2)), (Offer(len(TEXT) - 1, (1, 2)), ())):
        _, (landed, _) = both(made, [], [Seat(2, 2, offer, max_copy=2, sure=2), Seat(0, 1)], "portfolio")
        assert landed.drafted == drafted
        assert landed.match is None


BLOCK = {"markov": Markov("rnn", 8), "anchor_first": True, "window": 7}
OTHERS = [] if ON_GPU else [pytest.param("medusa", {}, marks=pytest.mark.slow)]


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("eagle", {}),
        ("eagle", {"branches": 2}),
        ("eagle", {"branches": None}),
        pytest.param("block", BLOCK, marks=pytest.mark.slow),
        *OTHERS,
    ],
    ids=str,
)
def test_copies_beside_a_head(
    drafter: str, options: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies longer than the head's drafts, then rounds in which the head goes on from what they had right, rounds
    without the head, and rounds of the head alone."""
    monkeypatch.setattr(on_device, "TREE_SEATS", 1)
    made = pair(device, drafter, portfolio=True, **options)
    assert [*made[0].tapping] == [*made[1].tapping] == [drafter, "portfolio"]
    assert made[0]._held[drafter] is made[0]._held["portfolio"]
    drawn(made)
    for sure in (2, 1, NEVER):
        seats = [Seat(2, 3, max_copy=8, sure=sure), Seat(0, 3, max_copy=4, sure=NEVER)]
        _, landed = both(made, [], seats, "portfolio")
        check(made, landed)
    _, landed = both(made, [], [Seat(2, 0, max_copy=8, sure=1), Seat(0, 0, max_copy=8, sure=1)], "portfolio")
    assert all(each.match is not None and not each.match.drafted for each in landed)
    for _ in range(2):
        both(made, [], [Seat(2, 3, max_copy=8, sure=1)], "portfolio")
    both(made, [], [Seat(2, 3), Seat(0, 3)], drafter)


def check(made: tuple[Any, Any], landed: list[Landed]) -> None:
    """Both have the same lengths, and held as many states."""
    assert torch.equal(made[0]._state.lengths.cpu(), made[1]._state.lengths)
    assert torch.equal(made[0]._state.held.cpu(), made[1]._state.held)
    assert all(each.match is not None for each in landed)


def test_a_text_in_a_loop_is_copied_whole(device: torch.device) -> None:
    """All of a copy is right: the target is made to say the loop."""
    made = pair(device, "eagle", portfolio=True)
    for rounds in made:
        rounds.synthetic_acceptance = 1.0
    drawn(made)
    _, (first, _) = both(made, [], [Seat(2, 0, max_copy=8, sure=1), Seat(0, 0)], "portfolio")
    assert len(first.drafted) in (0, 8)
    for rounds in made:
        enter(rounds, 1, [7, 8] * 4, temperature=0)
    both(made, [Chunk(1, 0, 7, draws=False, drafts=True)], [], "portfolio")
    _, (looped,) = both(made, [], [Seat(1, 0, max_copy=8, sure=2)], "portfolio")
    assert looped.drafted == (7, 8) * 4
    assert len(looped.tokens) == 9
    assert made[0]._graphs._eager or made[0]._graphs._recorded


def test_rounds_of_copies_alone_are_not_taken_for_plain_ones(device: torch.device) -> None:
    """Nor for rounds of the network; and they say how many of the tokens that they allow are found."""
    rounds, _ = pair(device, "eagle", portfolio=True)
    for seat in (Seat(0, 0, max_copy=8, sure=3), Seat(0, 3, max_copy=8, sure=3), Seat(0, 0)):
        bucket = rounds._wanted.find([seat] * 8, "portfolio", 30)
        ticket = Ticket([], [seat] * 8, bucket, None, ReadChunks(), None, typical=True)
        rounds._learn(ticket, [Landed((), (7,) * (seat.longest // 4), (1,))] * 8, Times(step=1.0 + bucket.draft))
    assert {key for key, known in rounds._seconds.items() if known} == {(0, "portfolio"), (3, "portfolio"), (0, None)}
    assert rounds.round_seconds(8, 0, "portfolio") == 1.0
    assert rounds.round_seconds(8, 3, "portfolio") == 4.0
    assert rounds._wanted._found["portfolio"] == pytest.approx(0.25 + 0.75 * 0.9**2)


def test_the_bucket_of_a_portfolio(device: torch.device) -> None:
    """As many passes as the network drafts, and room for copies, with the network or without it."""
    rounds, _ = pair(device, "eagle", portfolio=True)
    beside = rounds._wanted.find([Seat(0, 3, max_copy=8, sure=3), Seat(1, 2, max_copy=4, sure=3)], "portfolio", 30)
    assert (beside.draft, beside.copies, beside.longest, beside.drafter) == (3, 8, 8, "portfolio")
    assert beside.rows == 16
    alone = rounds._wanted.find([Seat(0, 0, max_copy=4, sure=3)], "portfolio", 30)
    assert (alone.draft, alone.copies, alone.drafter, alone.rows) == (0, 4, "portfolio", 5)
    plain = rounds._wanted.find([Seat(0, 0)], "portfolio", 30)
    assert (plain.longest, plain.drafter) == (0, "portfolio")
