"""Short prompts beside decoding sequences wait for each other, by the time that a device takes to read them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from paceline.engine.gathering import Gathering
from paceline.engine.reading import TELLING_ROWS
from paceline.runner.rounds.protocol import Times
from tests.laws import under_law
from tests.rig import Rig, build
from tests.runs import run, tokens_of

COUNT = 9
Timed = Callable[[bool], Times]


def test_decoding_gets_the_time_that_reading_took() -> None:
    gathering = Gathering()
    assert not gathering.holds(3)
    gathering.launched(3)
    assert gathering.holds(3)
    assert not gathering.holds(TELLING_ROWS)
    gathering.launched(0)
    gathering.landed(read=0.010, step=0.012)
    assert gathering.holds(3)
    gathering.landed(read=0.0, step=0.006)
    gathering.launched(0)
    assert gathering.holds(3)
    gathering.landed(read=0.0, step=0.006)
    assert not gathering.holds(3)


def test_many_rows_hold_nobody() -> None:
    gathering = Gathering()
    gathering.launched(TELLING_ROWS)
    assert not gathering.holds(3)
    gathering.landed(read=0.05, step=0.05)
    assert not gathering.holds(3)


def device(times: Timed, **options: Any) -> Rig:
    """An engine on a device that takes these times for steps that read prompts, and for others."""
    rig = build("toy", {}, on_device={}, **options)
    rig.engine._gathers = True  # as on a device with clocks
    collect = rig.rounds.collect

    def timed(ticket: Any) -> Any:
        chunks, seats, _ = collect(ticket)
        return chunks, seats, times(bool(chunks))

    rig.rounds.collect = timed
    return rig


def reading_steps(rig: Rig) -> list[int]:
    return [i for i, chunks in enumerate(rig.rounds.chunks) if chunks]


@pytest.mark.parametrize("ratio", [0, 1, 4, 20])
def test_steps_that_read_keep_their_distance(ratio: int) -> None:
    rig = device(lambda reads: Times(step=1e-3 * (1 + ratio * reads), read=1e-3 * ratio * reads))
    told = run(rig, under_law.device_requests("sampled", count=COUNT), every=1)
    assert tokens_of(told) == tokens_of(under_law.plain_device_answers("toy", "sampled", COUNT))
    reads = reading_steps(rig)
    seats = [len(each) for each in rig.rounds.seats]
    gaps = [later - earlier for earlier, later in pairwise(reads) if seats[later]]
    assert all(gap > ratio for gap in gaps), "but where nothing decodes"
    assert gaps or ratio > 4
    assert len(reads) > 3 or ratio > 4


def test_a_device_without_clocks_reads_at_once() -> None:
    rig = device(lambda reads: Times())
    run(rig, under_law.device_requests("sampled", count=COUNT), every=1)
    reads = reading_steps(rig)
    assert min(later - earlier for earlier, later in pairwise(reads)) <= 2
