"""Drafts where the host, or the rows of a verification, make rounds with drafts dear: by a device without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from paceline.draft import Draft
from paceline.drafters.base import Ask, Drafter
from paceline.drafters.guard import Guard
from paceline.engine import round_governor
from paceline.engine.host_times import HostTimes
from paceline.engine.rests import AFTER_TRIAL, MAX_PROBED_REST, Chance, Trials, speeds
from paceline.runner.rounds.protocol import Seat
from tests.stub_rounds import TOKEN, Clock, StubRounds, engine_with, submit

MILLISECOND, VOCAB = 1e-3, 64
Host = Callable[[Sequence[Seat]], float]
Device = Callable[[int, int], float]


def speed(
    host: Host, device: Device, *, batch: int, steps: int, drafts: bool, drafter: Drafter | None = None, **stub: Any
) -> tuple[float, StubRounds]:
    """Return tokens per second of the first `steps` rounds in which all decode; `drafter`: one on the host, if any."""
    clock = Clock()
    rounds = StubRounds(clock, device, host, **stub)
    guards = {} if drafter is None else {drafter.name: Guard(drafter, vocab_size=VOCAB, timeout=1.0)}
    engine = engine_with(rounds, batch=batch, drafters=guards)
    for i in range(batch):
        submit(engine, f"{i}", enabled=drafts)
    while not rounds.rounds:
        engine.step()
        assert engine.dead is None, engine.dead
    began, before = clock.now, rounds.tokens
    for _ in range(steps):
        engine.step()
    return (rounds.tokens - before) / (clock.now - began), rounds


def flat(seats: int, drafted: int) -> float:
    return MILLISECOND


def by_rows(seats: int, drafted: int) -> float:
    return MILLISECOND * (1 + drafted / seats / 8) if drafted else MILLISECOND


def quick(seats: Sequence[Seat]) -> float:
    return 0.2 * MILLISECOND


def slow(seats: Sequence[Seat]) -> float:
    """A host that is the limit as soon as sequences draft: 2.3 ms for 64 of them."""
    return 0.8 * MILLISECOND + sum(bool(seat.max_draft) for seat in seats) * MILLISECOND / 42


@pytest.mark.unwatched
@pytest.mark.parametrize("batch", [8, 64])
@pytest.mark.parametrize(("found", "rate"), [(1.0, 0.0), (0.0, 0.0), (0.3, 0.4), (1.0, 0.2)])
@pytest.mark.parametrize(("host", "device"), [(slow, flat), (quick, by_rows), (slow, by_rows)])
def test_drafts_that_do_not_pay_cost_nearly_nothing(
    host: Host, device: Device, found: float, rate: float, batch: int
) -> None:
    """From the first hundred rounds on: times include those of the host, and plain rounds come first."""
    plain, _ = speed(host, device, batch=batch, steps=100, drafts=False)
    with_drafts, rounds = speed(host, device, batch=batch, steps=100, drafts=True, found=found, rate=rate)
    assert rounds.drafting >= 1, "it was never tried"
    assert with_drafts >= 0.98 * plain


@pytest.mark.unwatched(wholly=True)
@pytest.mark.parametrize("batch", [1, 16, 64])
def test_drafts_that_pay_are_made(batch: int) -> None:
    plain, _ = speed(quick, by_rows, batch=batch, steps=100, drafts=False)
    with_drafts, rounds = speed(quick, by_rows, batch=batch, steps=100, drafts=True, rate=0.8)
    assert rounds.drafting > 90
    assert with_drafts > 1.5 * plain


def test_a_large_batch_looks_less_often_for_the_best_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the host longer there, and the average of many sequences changes slowly."""
    looks: list[int] = []

    def look(chances: Sequence[Chance], seconds: Sequence[float], levels: Sequence[int]) -> list[float]:
        looks.append(len(chances))
        return speeds(chances, seconds, levels)

    monkeypatch.setattr(round_governor, "speeds", look)
    for batch, most in ((8, 62), (64, 18)):
        looks.clear()
        _, rounds = speed(quick, by_rows, batch=batch, steps=60, drafts=True, rate=0.8)
        assert rounds.drafting > 50
        assert 10 < len(looks) <= most


@pytest.mark.unwatched(wholly=True)
def test_the_same_drafts_pay_where_the_host_is_quick() -> None:
    """By the device alone they would pay in both cases."""
    chances = {"batch": 64, "steps": 300, "drafts": True, "found": 0.5, "rate": 0.5}
    _, bound = speed(slow, flat, **chances)
    _, free = speed(quick, flat, **chances)
    assert bound.drafting < 0.05 * bound.rounds
    assert free.drafting > 0.9 * free.rounds


@dataclass
class BusyAtFirst:
    """A quick host that another process kept busy for 30 ms in each of its first rounds with drafts."""

    rounds: int

    def __call__(self, seats: Sequence[Seat]) -> float:
        busy = self.rounds > 0 and any(seat.max_draft for seat in seats)
        self.rounds -= busy
        return 30 * MILLISECOND if busy else quick(seats)


@pytest.mark.unwatched(wholly=True)
@pytest.mark.parametrize("busy", [1, 2])
def test_busy_moments_in_the_first_rounds_with_drafts_do_not_end_drafting(busy: int) -> None:
    """After a rest the host is measured anew, so that a time that was too long is forgotten."""
    _, rounds = speed(BusyAtFirst(busy), flat, batch=16, steps=800, drafts=True, rate=0.8)
    assert rounds.drafting > 75
    rests = sum(AFTER_TRIAL * 4**trial for trial in range(busy))
    assert rounds.rounds - rounds.drafting < rests + 32


@pytest.mark.unwatched(wholly=True)
def test_drafts_that_could_never_pay_are_not_tried_again() -> None:
    """A draft takes ten plain rounds: by the device alone even perfect ones lose, whatever the host needs."""
    dear = {"batch": 16, "steps": 800, "drafts": True, "rate": 0.9}
    _, rounds = speed(quick, lambda seats, drafted: (10 if drafted else 1) * MILLISECOND, **dear)
    assert rounds.rounds > 700
    assert 1 <= rounds.drafting <= 2, "the trial of the first rounds"


def test_rests_after_trials_grow() -> None:
    trials = Trials()
    rests = []
    for _ in range(4):
        trials.goes_plain("stub", batch=4, knows_plain=True)
        rests.append(trials.end("stub", pays=False))
    assert rests == [AFTER_TRIAL, 4 * AFTER_TRIAL, 16 * AFTER_TRIAL, MAX_PROBED_REST]
    assert trials.end("stub", pays=True) == 0, "there was no trial"
    trials.goes_plain("stub", batch=4, knows_plain=True)
    assert trials.end("stub", pays=False) == AFTER_TRIAL, "it starts anew once drafts have paid"


def test_masks_have_times_of_their_own() -> None:
    """Sixteen grammars take the host several times as long; the next requests without one do not pay for that."""
    times = HostTimes()
    times.learn(0.5, drafter=None, batch=16)
    assert times.pair("head", batch=16, masked=False) is None
    times.learn(1.0, drafter="head", batch=16)
    times.learn(3.3, drafter="head", batch=16, masked=True)
    assert times.pair("head", batch=16, masked=False) == (0.5, 1.0)
    assert times.pair("head", batch=16, masked=True) == (0.5, 1.0), "a plain round with masks was not measured"
    times.learn(2.0, drafter=None, batch=16, masked=True)
    assert times.pair("head", batch=16, masked=True) == (2.0, 3.3)
    times.forget("head")
    assert times.pair("head", batch=16, masked=True) is None
    assert times.of(None, batch=16) == 0.5


class Always(Drafter):
    """A drafter on the host that always has tokens."""

    name = "host"

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [Draft(tokens=(TOKEN,) * ask.max_draft) for ask in asks]


@pytest.mark.unwatched(wholly=True)
@pytest.mark.parametrize(("host", "drafting"), [(slow, False), (quick, True)])
def test_drafters_on_the_host_are_weighed_as_well(host: Host, drafting: bool) -> None:
    """Their offers keep the host busy beside the device; where that takes longer than they bring, they rest."""
    chances = {"batch": 64, "steps": 300, "rate": 0.5}
    plain, _ = speed(host, flat, drafts=False, **chances)
    with_drafts, rounds = speed(host, flat, drafts=True, drafter=Always(), drafters={}, **chances)
    assert rounds.drafting >= 1, "it was never tried"
    assert (rounds.drafting > 0.9 * rounds.rounds) is drafting
    assert with_drafts >= 0.98 * plain
