"""Streams on their way to Ray's proxy: fast ones rest after a chunk, slow ones never, and an end waits for nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from paceline.cluster.pace import MAX_REST_SECONDS, REST_SECONDS, Pace

STEP = REST_SECONDS / 10  # between two tokens of a fast stream


class Clock:
    """The time of a loop that sleeps without waiting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 5.0
        self.rests: list[float] = []
        monkeypatch.setattr(asyncio, "sleep", self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.rests.append(seconds)
        self.now += seconds

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        async def timed() -> None:
            asyncio.get_running_loop().time = lambda: self.now  # type: ignore[method-assign]
            await work

        asyncio.run(timed())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def body(*, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": b"x", "more_body": more}


async def play(pace: Pace, clock: Clock, messages: Sequence[dict[str, Any]], *, step: float) -> list[float]:
    """Send messages as they come, `step` seconds after the one before was sent, and return when each was."""
    sent: list[float] = []

    async def send(message: Any) -> None:
        sent.append(clock.now)

    with pace.stream(send) as paced:
        for message in messages:
            clock.now += step
            await paced(message)
    return sent


def test_a_fast_stream_rests_after_each_chunk_but_its_first(clock: Clock) -> None:
    async def work() -> None:
        await play(Pace(), clock, [body()] * 4, step=STEP)

    clock.run(work())
    assert clock.rests == [REST_SECONDS] * 3


def test_a_slow_stream_never_rests(clock: Clock) -> None:
    async def work() -> None:
        await play(Pace(), clock, [body()] * 4, step=2 * REST_SECONDS)

    clock.run(work())
    assert clock.rests == []


def test_starts_ends_and_whole_answers_wait_for_nothing(clock: Clock) -> None:
    pace, start = Pace(), {"type": "http.response.start", "status": 200}

    async def work() -> None:
        assert len(await play(pace, clock, [start, body(more=False)], step=0.0)) == 2
        await play(pace, clock, [start, body(), body(more=False)], step=0.0)

    clock.run(work())
    assert (clock.rests, pace.open) == ([], 0)


@pytest.mark.parametrize(("streams", "rest"), [(16, 16 * REST_SECONDS), (5000, MAX_REST_SECONDS)])
def test_all_streams_together_send_so_many_chunks_a_second(clock: Clock, streams: int, rest: float) -> None:
    pace = Pace()
    pace.open = streams - 1

    async def work() -> None:
        await play(pace, clock, [body(), body()], step=STEP)

    clock.run(work())
    assert clock.rests == [pytest.approx(rest)]


def test_a_stream_that_breaks_counts_no_more(clock: Clock) -> None:
    pace = Pace()

    async def broken(message: Any) -> None:
        if pace.open:
            raise ConnectionError

    async def work() -> None:
        with pace.stream(broken) as paced:
            await paced(body())
            assert pace.open == 1
            await paced(body())

    with pytest.raises(ConnectionError):
        clock.run(work())
    assert pace.open == 0
