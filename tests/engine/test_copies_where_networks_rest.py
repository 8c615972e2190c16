"""Copies of a portfolio whose network does not pay, or need not draft: by a device without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.engine.copies import LOOK_ROUNDS, Copies
from paceline.engine.copying import Copying
from paceline.runner.rounds.protocol import Chunk, Landed, Match, Seat, Ticket
from paceline.types import Off, OffKind
from tests.stub_rounds import TOKEN, Clock, Stub, StubRounds, engine_with, submit

MILLISECOND, PROMPT = 1e-3, 3  # tokens of a prompt, behind which all are the same


class PortfolioStub(Stub):
    """A network with a head, and copies beside it."""

    max_copy, network, max_draft, taps, ends_drafts = 4, "head", 4, (1,), True


@dataclass
class CopyingRounds(StubRounds):
    """A pass of the network takes as long as `dear` plain rounds. Texts may repeat, and copies have tokens right."""

    repeats: bool = True
    right: int = 4
    dear: float = 1.0
    seats: list[Sequence[Seat]] = field(default_factory=list)

    def launch(self, chunks: Sequence[Chunk], seats: Sequence[Seat], **options: Any) -> Ticket:
        self.seats.append(seats)
        return super().launch(chunks, seats, **options)

    def _land(self, seat: Seat) -> Landed:
        landed, network = super()._land(seat), seat.max_draft > 0
        if not seat.max_copy:
            return landed
        if self.repeats and 0 < seat.sure <= 6:
            drafted, right = (TOKEN,) * seat.max_copy, min(seat.max_copy, self.right)
            return Landed(tuple(range(right)), drafted, (TOKEN,) * (right + 1), match=Match(6, PROMPT, network, True))
        return landed._replace(match=Match(6 if self.repeats else 0, PROMPT, network, False))


def run(
    *, batch: int, steps: int, drafts: bool = True, repeating: Sequence[int] = (), **stub: Any
) -> tuple[float, CopyingRounds]:
    """Return tokens per second of the first rounds in which all decode. `repeating`: steps in which texts repeat."""
    clock = Clock()
    rounds: CopyingRounds

    def device(seats: int, drafted: int) -> float:
        passes = max(seat.max_draft for seat in rounds.seats[-1]) if rounds.seats[-1] else 0
        return MILLISECOND * (1 + rounds.dear * passes + drafted / max(seats, 1) / 50)

    def host(seats: Sequence[Seat]) -> float:
        return 0.1 * MILLISECOND

    drafters = {"stub": PortfolioStub()}
    rounds = CopyingRounds(clock, device, host, drafters=drafters, tapping=("stub",), **stub)
    engine = engine_with(rounds, batch=batch)
    for i in range(batch):
        submit(engine, f"{i}", enabled=drafts)
    while not rounds.rounds:
        engine.step()
    began, before = clock.now, rounds.tokens
    for step in range(steps):
        rounds.repeats = step in repeating if repeating else rounds.repeats
        engine.step()
        assert engine.dead is None, engine.dead
    return (rounds.tokens - before) / (clock.now - began), rounds


@pytest.mark.unwatched(wholly=True)
@pytest.mark.parametrize("batch", [1, 16])
def test_copies_go_on_where_the_network_rests(batch: int) -> None:
    """Its passes never pay, and every text repeats."""
    plain, _ = run(batch=batch, steps=120, drafts=False)
    with_copies, rounds = run(batch=batch, steps=120, rate=0.2, dear=1.0)
    assert with_copies > 3 * plain
    late = [seat for seats in rounds.seats[-40:] for seat in seats]
    assert all(seat.max_copy and not seat.max_draft for seat in late)


@pytest.mark.unwatched(wholly=True)
@pytest.mark.parametrize("batch", [1, 16])
def test_the_network_goes_on_where_nothing_repeats(batch: int) -> None:
    plain, _ = run(batch=batch, steps=120, drafts=False)
    drafting, rounds = run(batch=batch, steps=120, rate=0.9, dear=0.05, repeats=False)
    assert drafting > 2 * plain
    assert rounds.drafting > 90


@pytest.mark.unwatched(wholly=True)
@pytest.mark.parametrize("batch", [1, 16])
def test_where_neither_helps_rounds_are_plain(batch: int) -> None:
    """Texts are looked at now and then, all in the same round."""
    plain, _ = run(batch=batch, steps=400, drafts=False)
    with_both, rounds = run(batch=batch, steps=400, rate=0.0, dear=1.0, repeats=False)
    assert with_both > 0.97 * plain
    late = rounds.seats[-10 * LOOK_ROUNDS :]
    looked = [any(seat.max_copy for seat in seats) for seats in late]
    assert 8 <= sum(looked) <= 12
    assert all(all(seat.max_copy for seat in seats) for seats, looks in zip(late, looked, strict=True) if looks)


@pytest.mark.unwatched(wholly=True)
def test_copies_make_no_rest_of_the_network_longer() -> None:
    """It is tried again as it would be without them: they cost time, but not the network's."""
    tried = []
    for repeating in (range(0, 200, 3), range(900, 901)):
        _, rounds = run(batch=2, steps=200, rate=0.0, dear=0.05, repeating=repeating)
        tried.append(sum(any(seat.max_draft for seat in seats) for seats in rounds.seats[-150:]))
    assert tried[0] >= 0.7 * tried[1] > 2


@pytest.mark.unwatched(wholly=True)
def test_a_network_whose_drafts_are_never_used_rests() -> None:
    """Copies take their place in every round, and have half of their tokens right."""
    _, rounds = run(batch=2, steps=120, rate=0.8, dear=0.05, right=2)
    assert not any(seat.max_draft for seats in rounds.seats[-60:] for seat in seats)
    assert all(seat.max_copy for seats in rounds.seats[-60:] for seat in seats)


@pytest.mark.unwatched(wholly=True)
def test_a_network_that_pays_rests_while_texts_repeat() -> None:
    """And drafts again as soon as they do not: no rest of the governor keeps it off."""
    _, rounds = run(batch=2, steps=130, rate=0.8, dear=0.05, repeating=range(50, 100))
    alone = [all(seat.max_copy and not seat.max_draft for seat in seats) for seats in rounds.seats[-130:]]
    assert all(alone[70:100])
    assert not any(alone[105:])
    assert all(seat.max_draft for seats in rounds.seats[-25:] for seat in seats)


@pytest.mark.unwatched(wholly=True)
def test_a_network_that_pays_for_all_may_not_pay_for_one() -> None:
    """Seven of eight texts repeat: what the network would draft for them brings nothing."""

    class Mixed(CopyingRounds):
        def _land(self, seat: Seat) -> Landed:
            self.repeats = seat.lane > 0
            return super()._land(seat)

    passes = [0]
    rounds = Mixed(
        Clock(),
        lambda seats, drafted: MILLISECOND * (1 + 0.3 * passes[0] + drafted / max(seats, 1) / 50),
        lambda seats: 0.1 * MILLISECOND,
        drafters={"stub": PortfolioStub()},
        tapping=("stub",),
        rate=0.8,
    )
    launch = rounds.launch

    def watched(chunks: Sequence[Chunk], seats: Sequence[Seat], **options: Any) -> Ticket:
        passes[0] = max([seat.max_draft for seat in seats], default=0)
        return launch(chunks, seats, **options)

    rounds.launch = watched  # type: ignore[method-assign]
    engine = engine_with(rounds, batch=8)
    for i in range(8):
        submit(engine, f"{i}")
    for _ in range(120):
        engine.step()
    late = [max(seat.max_draft for seat in seats) for seats in rounds.seats[-30:]]
    assert sum(map(bool, late)) <= 3
    assert all(sum(seat.max_copy > 0 for seat in seats) >= 7 for seats in rounds.seats[-30:])


@pytest.mark.unwatched(wholly=True)
def test_one_text_that_repeats_does_not_stop_the_network_of_others() -> None:
    """Nor do its copies count as the network's drafts."""

    class Mixed(CopyingRounds):
        def _land(self, seat: Seat) -> Landed:
            self.repeats = seat.lane == 0
            return super()._land(seat)

    clock = Clock()
    rounds = Mixed(
        clock,
        lambda seats, drafted: MILLISECOND * (1.2 + drafted / max(seats, 1) / 50),
        lambda seats: 0.1 * MILLISECOND,
        drafters={"stub": PortfolioStub()},
        tapping=("stub",),
        rate=0.8,
    )
    engine = engine_with(rounds, batch=4)
    for i in range(4):
        submit(engine, f"{i}")
    for _ in range(120):
        engine.step()
    late = [seat for seats in rounds.seats[-20:] for seat in seats]
    assert all(seat.max_draft and seat.max_copy for seat in late)
    rates = [sequence.pace.recent()[1] for sequence in engine._scheduler.running]
    assert all(rate < 0.95 for rate in rates)


@pytest.mark.parametrize(("wishes", "longest"), [([3, 2], 3), ([3], 16), ([0, 0], 16)])
def test_beside_drafts_for_others_a_copy_is_no_longer_than_the_longest_of_them(wishes: list[int], longest: int) -> None:
    """All seats of a round have as many rows."""
    stub = PortfolioStub()
    stub.max_copy = 16  # type: ignore[misc]
    copies = Copies(SimpleNamespace(drafters={"stub": stub}, max_draft=16))  # type: ignore[arg-type]
    paused = Off(OffKind.PLAIN_FASTER, "plain rounds are faster")
    sequences: list[Any] = [SimpleNamespace(drafter="stub", copying=Copying(length=16), off=paused) for _ in wishes]
    copies.plan(sequences, wishes, lambda sequence: 50)
    assert {sequence.copying.max_copy for sequence in sequences} == {longest}
