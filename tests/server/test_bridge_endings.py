"""How requests end behind asyncio: readers that leave, draining, closing, failures. Each ends once, nothing stays."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.errors import EngineDead, NotReady
from paceline.server import bridge as bridge_module
from paceline.server.bridge import Bridge
from paceline.server.stream import Stream
from paceline.types import Finish, SequenceStats, TokenEvent
from tests.runs import run
from tests.server.bridged import LONG, Gate, a_request, aio, bridged, read, rig_of


def test_leaving_early_aborts() -> None:
    async def close_at_once(stream: Stream) -> None:
        await stream.aclose()

    async def leave_in_the_middle(stream: Stream) -> None:
        async with stream:
            async for _ in stream:
                break

    async def be_cancelled(stream: Stream) -> None:
        async def forever() -> None:
            while True:
                await stream.__anext__()

        task = asyncio.create_task(forever())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def scenario() -> None:
        async with bridged(rig_of()) as bridge:
            finishes: list[Finish] = []
            bridge.listeners.append(lambda event: finishes.append(event.finish) if event.finish else None)
            for i, leave in enumerate((close_at_once, leave_in_the_middle, be_cancelled)):
                stream = bridge.submit(a_request(str(i)))
                await leave(stream)
                with pytest.raises(StopAsyncIteration):
                    await stream.__anext__()
                await bridge._idle.wait()
            assert finishes == [Finish.ABORT] * 3

    aio(scenario())


def test_what_came_before_the_reader_left_is_not_read_after() -> None:
    async def scenario() -> None:
        async with bridged(rig_of()) as bridge:
            stream = bridge.submit(a_request())
            await stream.__anext__()
            while not stream._events:
                await asyncio.sleep(0.001)
            await stream.aclose()
            assert [event async for event in stream] == []

    aio(scenario())


def test_a_sample_ends_once_whatever_is_said_of_it() -> None:
    async def scenario() -> None:
        rig = rig_of()
        gate = Gate(rig)
        async with bridged(rig) as bridge:
            stream = bridge.submit(a_request(sampling=replace(LONG, n=2)))
            end = TokenEvent(request_id="r", sample=0, finish=Finish.ERROR, error="broken", stats=SequenceStats())
            bridge._deliver([end, end], None)
            assert bridge._sequences == 1
            gate.opened.set()
            told = await read(stream)
            assert [each.finish for each in told.values()] == [Finish.ERROR, Finish.LENGTH]

    aio(scenario())


def test_a_thousand_submits_and_aborts_leave_nothing_behind() -> None:
    async def scenario() -> None:
        rig = rig_of()
        async with bridged(rig, max_waiting=2000) as bridge:
            survivor = bridge.submit(a_request("survivor"))
            for i in range(1000):
                stream = bridge.submit(a_request(str(i)))
                if i % 3 == 1:
                    await asyncio.sleep(0)
                elif i % 100 == 2:
                    await stream.__anext__()
                await stream.aclose()
            [told] = (await read(survivor)).values()
            await bridge._idle.wait()
            assert rig.engine._open == {}
        [alone] = run(rig_of(), [a_request()]).values()
        assert told.tokens == alone.tokens

    aio(scenario())


def test_draining_lets_requests_end() -> None:
    async def scenario() -> None:
        async with bridged(rig_of()) as bridge:
            reading = asyncio.create_task(read(bridge.submit(a_request())))
            await bridge.drain(20)
            [told] = (await reading).values()
            assert told.finish is Finish.LENGTH
            with pytest.raises(NotReady, match="draining"):
                bridge.submit(a_request("late"))

    aio(scenario())


def test_draining_waits_for_the_last_one() -> None:
    async def scenario() -> None:
        async with bridged(rig_of()) as bridge:
            for name, tokens in (("short", 2), ("long", 120)):
                bridge.submit(a_request(name, replace(LONG, max_tokens=tokens)))
            await bridge.drain(20)
            assert bridge.open_requests == 0

    aio(scenario())


def test_draining_ends_what_takes_too_long() -> None:
    async def scenario() -> None:
        rig = rig_of()
        gate = Gate(rig)
        async with bridged(rig) as bridge:
            readings = [asyncio.create_task(read(bridge.submit(a_request(str(i))))) for i in range(12)]
            slow = asyncio.create_task(bridge.drain(1000))
            await asyncio.sleep(0)
            fast = asyncio.create_task(bridge.drain(0))  # the second signal
            gate.opened.set()
            await asyncio.gather(slow, fast)
            answers = await asyncio.gather(*readings)
            assert {each.finish for answer in answers for each in answer.values()} == {Finish.ABORT}

    aio(scenario())


def test_closing_ends_what_runs() -> None:
    async def scenario() -> None:
        async with bridged(rig_of()) as bridge:
            reading = asyncio.create_task(read(bridge.submit(a_request())))
            await asyncio.sleep(0)
        [told] = (await reading).values()
        assert told.finish in (Finish.ABORT, Finish.LENGTH)

    aio(scenario())


def _fail() -> list[TokenEvent]:
    raise RuntimeError("a bolt is loose")


@pytest.mark.parametrize("part", ["_step", "step"])
def test_a_failure_ends_every_request_once(part: str) -> None:
    """The engine's own, which it reports, and one that it does not."""

    async def scenario() -> None:
        rig = rig_of()
        async with bridged(rig) as bridge:
            setattr(rig.engine, part, _fail)
            streams = [bridge.submit(a_request(str(i), replace(LONG, n=2))) for i in range(12)]
            answers = await asyncio.gather(*map(read, streams))
            told = [each for answer in answers for each in answer.values()]
            assert [each.finish for each in told] == [Finish.ERROR] * 24
            assert all("a bolt is loose" in str(each.error) for each in told)
            assert bridge.state == "dead"
            with pytest.raises(EngineDead, match="restart the server"):
                bridge.submit(a_request("late"))
            if part == "step":  # nobody is left to clean up
                del rig.engine.step
                for i in range(12):
                    rig.engine.abort(str(i))
                rig.engine.step()

    aio(scenario())


def test_a_request_on_its_way_to_a_dead_engine_ends_too() -> None:
    async def scenario() -> None:
        rig = rig_of()
        async with bridged(rig) as bridge:
            rig.engine.dead = "RuntimeError: long ago"
            [told] = (await read(bridge.submit(a_request()))).values()
            assert told.finish is Finish.ERROR
            assert bridge.state == "dead"

    aio(scenario())


def test_a_step_that_hangs_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge_module, "JOIN_SECONDS", 0.01)
    rig = rig_of()
    gate = Gate(rig)

    async def scenario() -> Bridge:
        llm: Any = SimpleNamespace(engine=rig.engine, tokenizer=None)
        bridge = Bridge(llm, model="toy")
        await bridge.start()
        reading = asyncio.create_task(read(bridge.submit(a_request())))
        await asyncio.sleep(0)
        await bridge.close()
        [told] = (await reading).values()
        assert told.finish is Finish.ERROR
        assert bridge.state == "dead"
        return bridge

    bridge = asyncio.run(scenario())
    gate.opened.set()  # the thread goes by itself, without a loop to tell
    bridge._thread.join(timeout=200)
    assert not bridge._thread.is_alive()
    rig.engine.check()
