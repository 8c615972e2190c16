"""Drafts where the host, or the rows of a verification, make rounds with drafts dear: by a device without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from paceline.config import EngineConfig
from paceline.engine import governor
from paceline.engine.engine import Engine
from paceline.engine.rests import Chance, speeds
from paceline.kv.cache import KVCache
from paceline.runner.lanes import Lanes
from paceline.runner.rounds.protocol import Seat
from paceline.types import Request, SamplingParams, Speculation
from tests.stub_rounds import Clock, StubRounds
from tests.tiny_models import TARGET

CONTEXT, MILLISECOND = 1024, 1e-3
Host = Callable[[Sequence[Seat]], float]
Device = Callable[[int, int], float]


def speed(host: Host, device: Device, *, batch: int, steps: int, drafts: bool, **stub: Any) -> tuple[float, StubRounds]:
    """Return tokens per second of the first `steps` rounds in which all sequences decode."""
    clock = Clock()
    rounds = StubRounds(clock, device, host, **stub)
    config = EngineConfig.of(
        max_sequences=batch, max_draft=4, max_draft_batch=batch, max_step_tokens=64 * batch, max_draft_tokens=8 * batch
    )
    forward = TARGET.forward("toy", num_pages=batch * CONTEXT // 16)
    lanes = Lanes(count=batch, max_context=CONTEXT, max_draft=4)
    engine = Engine(
        forward,
        config=config,
        lanes=lanes,
        cache=KVCache(forward.kv, share_prefixes=False),
        max_context=CONTEXT,
        default_drafter="stub",
        rounds=rounds,
        clock=clock,
    )
    for i in range(batch):
        sampling = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
        speculation = Speculation(enabled=drafts)
        engine.submit(Request(id=f"{i}", prompt=(1, 2, 3), sampling=sampling, speculation=speculation))
    while not rounds.rounds:
        engine.step()
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


@pytest.mark.parametrize("batch", [1, 16, 64])
def test_drafts_that_pay_are_made(batch: int) -> None:
    plain, _ = speed(quick, by_rows, batch=batch, steps=100, drafts=False)
    with_drafts, rounds = speed(quick, by_rows, batch=batch, steps=100, drafts=True, rate=0.8)
    assert rounds.drafting > 90
    assert with_drafts > 1.5 * plain


def test_a_large_batch_looks_less_often_for_the_best_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the host longer there, and the average of many sequences changes slowly."""
    looks: list[int] = []

    def look(chances: Sequence[Chance], seconds: Sequence[float]) -> list[float]:
        looks.append(len(chances))
        return speeds(chances, seconds)

    monkeypatch.setattr(governor, "speeds", look)
    for batch, most in ((8, 62), (64, 18)):
        looks.clear()
        _, rounds = speed(quick, by_rows, batch=batch, steps=60, drafts=True, rate=0.8)
        assert rounds.drafting > 50
        assert 10 < len(looks) <= most


def test_the_same_drafts_pay_where_the_host_is_quick() -> None:
    """By the device alone they would pay in both cases."""
    chances = {"batch": 64, "steps": 300, "drafts": True, "found": 0.5, "rate": 0.5}
    _, bound = speed(slow, flat, **chances)
    _, free = speed(quick, flat, **chances)
    assert bound.drafting < 0.05 * bound.rounds
    assert free.drafting > 0.9 * free.rounds
