"""Streams on their way to Ray's proxy: fast ones rest after a chunk, slow ones never, and an end waits for nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from paceline.cluster.pace import MAX_REST_SECONDS, REST_SECONDS, Pace
from paceline.server.stream import Stream
from paceline.types import Finish, Request, SamplingParams, SequenceStats, TokenEvent

STEP = REST_SECONDS / 10  # between two tokens of a fast stream
REQUEST = Request(id="a", prompt=(1,), sampling=SamplingParams(max_tokens=4))


class Clock:
    """The time of a loop on which streams rest without waiting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 5.0
        self.rests: list[float] = []

        async def rest(stream: Stream, seconds: float) -> None:
            self.rests.append(seconds)
            self.now += seconds

        monkeypatch.setattr(Stream, "rest", rest)

    def run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def timed() -> None:
            asyncio.get_running_loop().time = lambda: self.now  # type: ignore[method-assign]
            await work()

        asyncio.run(timed())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def stream() -> Stream:
    return Stream([REQUEST], lambda ids: None)


async def play(pace: Pace, clock: Clock, chunks: int, *, step: float) -> None:
    """Send chunks, each `step` seconds after the rest of the one before."""
    with pace.stream() as pacing:
        for _ in range(chunks):
            clock.now += step
            await pacing.rest(stream())


def test_a_fast_stream_rests_after_each_chunk_but_its_first(clock: Clock) -> None:
    clock.run(lambda: play(Pace(), clock, 4, step=STEP))
    assert clock.rests == [REST_SECONDS] * 3


def test_a_slow_stream_never_rests(clock: Clock) -> None:
    clock.run(lambda: play(Pace(), clock, 4, step=2 * REST_SECONDS))
    assert clock.rests == []


@pytest.mark.parametrize(("streams", "rest"), [(16, 16 * REST_SECONDS), (5000, MAX_REST_SECONDS)])
def test_all_streams_together_send_so_many_chunks_a_second(clock: Clock, streams: int, rest: float) -> None:
    pace = Pace()
    pace.open = streams - 1
    clock.run(lambda: play(pace, clock, 2, step=STEP))
    assert clock.rests == [pytest.approx(rest)]


def test_a_stream_that_breaks_counts_no_more(clock: Clock) -> None:
    pace = Pace()

    async def work() -> None:
        with pace.stream() as pacing:
            await pacing.rest(stream())
            assert pace.open == 1
            raise ConnectionError

    with pytest.raises(ConnectionError):
        clock.run(work)
    assert pace.open == 0


def test_an_answer_that_is_complete_ends_its_rest() -> None:
    async def work() -> None:
        events, patience = stream(), asyncio.timeout(10)
        resting = asyncio.create_task(events.rest(1000))
        await asyncio.sleep(0)
        events.take(TokenEvent("a", 0, tokens=(5,)))
        await asyncio.sleep(0)
        assert not resting.done()
        events.take(TokenEvent("a", 0, finish=Finish.LENGTH, stats=SequenceStats()))
        async with patience:
            await resting
            await events.rest(1000)  # nothing is to come

    asyncio.run(work())
