"""First drafts and probes of a drafter that must read what it has missed: by a device without a model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.runner.rounds.protocol import Seat
from tests.engine.test_host_bound import MILLISECOND, Device, speed
from tests.stub_rounds import Stub


class ReadingStub(Stub):
    """A drafter with keys and values of its own, whose drafts have the length that is asked for."""

    finds_fewer = False


def host(seats: Sequence[Seat]) -> float:
    return 0.5 * MILLISECOND


def dear(seats: int, drafted: int) -> float:
    """Rounds of Llama-3.1-8B with 64 sequences and drafts by Llama-3.2-1B, on an H200."""
    return MILLISECOND * (5.2 + 2.3 * drafted / max(seats, 1))


def level(seats: int, drafted: int) -> float:
    """A row costs as much as a plain token: rounds of 256 sequences."""
    return MILLISECOND * (10 + 8.2 * drafted / max(seats, 1))


READS = {"drafters": {"stub": ReadingStub()}, "readers": ("stub",), "catch_up": 10 * MILLISECOND}


@pytest.mark.unwatched(wholly=True)
@pytest.mark.parametrize(("device", "rate", "steps"), [(dear, 0.3, 600), (level, 0.8, 200), (dear, 0.0, 200)])
def test_trials_and_probes_cost_nearly_nothing(device: Device, rate: float, steps: int) -> None:
    """The second trial of 600 rounds reads what two sequences have missed, not all of them."""
    plain, _ = speed(host, device, batch=64, steps=steps, drafts=False)
    with_drafts, rounds = speed(host, device, batch=64, steps=steps, drafts=True, rate=rate, **READS)
    assert rounds.drafting >= 1, "it was never tried"
    assert with_drafts >= 0.98 * plain


def test_a_trial_finds_drafts_that_pay() -> None:
    plain, _ = speed(host, dear, batch=64, steps=200, drafts=False)
    with_drafts, rounds = speed(host, dear, batch=64, steps=200, drafts=True, rate=0.9, **READS)
    assert rounds.drafting > 180
    assert with_drafts > 1.3 * plain
