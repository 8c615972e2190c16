"""The engine behind asyncio: the same tokens, every request ends once, and nothing stays behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.errors import EngineDead, InvalidRequest
from paceline.server import bridge as bridge_module
from paceline.server import logs
from paceline.server.bridge import Bridge, NotReady, QueueFull, Stream
from paceline.types import Finish, Request, SamplingParams, SequenceStats, TokenEvent
from tests.rig import RIGS, Rig, build
from tests.runs import GREEDY, SAMPLED, Told, mixed_requests, prompt, run, tokens_of
from tests.runs import Key as SampleKey
from tests.tiny_models import tiny_tokenizer

LONG = SamplingParams(temperature=0, max_tokens=120)


def aio(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, timeout=30))


def rig_of(**options: Any) -> Rig:
    return build("toy", {"ngram": RIGS["ngram"]["ngram"]}, tokenizer=tiny_tokenizer(), **options)


def a_request(name: str = "r", sampling: SamplingParams = LONG) -> Request:
    return Request(id=name, prompt=prompt(9, seed=1), sampling=sampling)


@asynccontextmanager
async def bridged(rig: Rig, **options: Any) -> AsyncIterator[Bridge]:
    llm: Any = SimpleNamespace(engine=rig.engine, tokenizer=tiny_tokenizer())
    bridge = Bridge(llm, model="toy", **options)
    await bridge.start()
    try:
        yield bridge
    finally:
        await bridge.close()
        assert not bridge._thread.is_alive()
        assert bridge.open_requests == bridge._sequences == 0
        rig.engine.check()
        assert rig.cache.pool.held == 0
        assert rig.lanes.free == len(rig.lanes.lengths)


async def read(stream: Stream) -> dict[SampleKey, Told]:
    told = {(id, i): Told() for id, request in stream.requests.items() for i in range(request.sampling.n)}
    async for event in stream:
        told[event.request_id, event.sample].add(event)
    return told


class Gate:
    """Holds the engine before its steps."""

    def __init__(self, rig: Rig) -> None:
        self.opened = threading.Event()
        step = rig.engine.step

        def gated() -> list[TokenEvent]:
            assert self.opened.wait(timeout=30)
            return step()

        rig.engine.step = gated  # type: ignore[method-assign]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_answers_are_those_of_the_engine(params: tuple[SamplingParams, ...]) -> None:
    requests = mixed_requests(params, [Request(id="", prompt=(1,)).speculation], count=32)
    expected = run(rig_of(), requests)

    async def scenario() -> None:
        async with bridged(rig_of()) as bridge:
            answers = await asyncio.gather(*(read(bridge.submit(request)) for request in requests))
            told = {key: each for answer in answers for key, each in answer.items()}
            assert {key: (each.tokens, each.text, each.finish) for key, each in told.items()} == {
                key: (each.tokens, each.text, each.finish) for key, each in expected.items()
            }

    aio(scenario())


def test_an_idle_engine_is_woken() -> None:
    async def scenario() -> None:
        async with bridged(rig_of()) as bridge:
            for i in range(3):
                [told] = (await read(bridge.submit(a_request(str(i))))).values()
                assert told.finish is Finish.LENGTH

    aio(scenario())


def test_events_of_a_step_cross_in_one_call() -> None:
    async def scenario() -> None:
        rig = rig_of()
        gate, steps, calls = Gate(rig), 0, 0
        gated = rig.engine.step

        def counted() -> list[TokenEvent]:
            nonlocal steps
            steps += 1
            return gated()

        async with bridged(rig) as bridge:
            rig.engine.step = counted  # type: ignore[method-assign]
            deliver = bridge._deliver

            def counting(*args: Any) -> None:
                nonlocal calls
                calls += 1
                deliver(*args)

            bridge._deliver = counting  # type: ignore[method-assign]
            streams = [bridge.submit(a_request(str(i), replace(LONG, max_tokens=20))) for i in range(6)]
            gate.opened.set()
            await asyncio.gather(*map(read, streams))
            assert calls <= steps
            assert steps < 6 * 20

    aio(scenario())


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


def test_a_full_queue_says_when_to_come_again() -> None:
    async def scenario() -> None:
        rig = rig_of(max_sequences=2)
        gate = Gate(rig)
        async with bridged(rig, max_waiting=3) as bridge:
            short = replace(LONG, max_tokens=3)
            streams = [bridge.submit(a_request(str(i), short)) for i in range(5)]
            with pytest.raises(QueueFull, match="3 sequences wait already") as caught:
                bridge.submit(a_request("late"))
            assert caught.value.retry_after >= 1
            assert caught.value.status == 429
            gate.opened.set()
            await asyncio.gather(*map(read, streams))
            await read(bridge.submit(a_request("late", short)))

    aio(scenario())


@pytest.mark.parametrize(("ends", "seconds"), [((), 1), ((5.0,), 1), ((0.0, 1.2, 2.4), 2), ((0.0, 500.0), 60)])
def test_who_comes_again_finds_a_place(ends: tuple[float, ...], seconds: int) -> None:
    """After as long as the latest ends took, each; not at once, and not tomorrow."""

    async def scenario() -> None:
        async with bridged(rig_of()) as bridge:
            bridge._ended_at.extend(ends)
            assert bridge._retry_after() == seconds

    aio(scenario())


def test_a_reader_that_reads_nothing_holds_up_nobody() -> None:
    async def scenario() -> None:
        async with bridged(rig_of(max_sequences=2)) as bridge:
            idle = [bridge.submit(a_request(f"idle {i}")) for i in range(6)]
            [told] = (await read(bridge.submit(a_request("busy")))).values()
            assert told.finish is Finish.LENGTH
            late = await asyncio.gather(*map(read, idle))
            assert [each.tokens for answer in late for each in answer.values()] == [told.tokens] * 6

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
    bridge._thread.join(timeout=10)
    assert not bridge._thread.is_alive()
    rig.engine.check()


def test_what_cannot_be_served_is_said_at_once() -> None:
    async def scenario() -> None:
        async with bridged(rig_of()) as bridge:
            with pytest.raises(InvalidRequest, match="outside of the vocabulary"):
                bridge.submit(Request(id="r", prompt=(10**6,)))
            stream = bridge.submit(a_request())
            with pytest.raises(InvalidRequest, match="in use"):
                bridge.submit(a_request())
            await stream.aclose()

    aio(scenario())


def test_what_the_engine_finds_later_is_raised_by_the_stream() -> None:
    def refuse(request: Request) -> None:
        raise InvalidRequest("no such grammar")

    async def scenario() -> None:
        rig = rig_of()
        async with bridged(rig) as bridge:
            rig.engine.submit = refuse  # type: ignore[method-assign]
            with pytest.raises(InvalidRequest, match="no such grammar"):
                await read(bridge.submit(a_request(sampling=replace(LONG, n=2))))
            assert bridge.state == "ready"
            assert bridge._sequences == 0, "both samples leave the queue"

    aio(scenario())


def test_before_the_start_and_after_the_end_nothing_is_taken() -> None:
    async def scenario() -> None:
        llm: Any = SimpleNamespace(engine=rig_of().engine, tokenizer=None)
        bridge = Bridge(llm, model="toy")
        with pytest.raises(NotReady, match="starting"):
            bridge.submit(a_request())
        await bridge.close()
        with pytest.raises(NotReady, match="draining"):
            bridge.submit(a_request())

    aio(scenario())


def test_the_snapshot_counts() -> None:
    async def scenario() -> None:
        rig = rig_of(max_sequences=2)
        async with bridged(rig) as bridge:
            before = bridge.stats()
            assert (before.running, before.waiting, before.pages_total) == (0, 0, 160)
            assert before.drafters == {"ngram": None}
            streams = [bridge.submit(a_request(str(i))) for i in range(5)]
            await asyncio.gather(*map(read, streams))
            after = bridge.stats()
            assert after.engine.finished == 5
            assert after.engine.output_tokens == 5 * 120
            assert (after.running, after.waiting, after.pages_held) == (0, 0, 0)
            assert before.engine.finished == 0, "a snapshot does not move"

    aio(scenario())


def test_the_log_learns_what_a_request_took() -> None:
    async def scenario() -> None:
        async with bridged(rig_of()) as bridge:
            record = logs.Record(request_id="x", method="POST", path="/", wants_prompts=True)
            token = logs.current.set(record)
            stream = bridge.submit(a_request("r", replace(LONG, n=2)))
            logs.current.reset(token)
            await read(stream)
            assert (record.prompt_tokens, record.output_tokens) == (18, 240)
            assert record.finishes == ["length"] * 2
            assert record.time_to_first is not None
            assert record.prompts == [tiny_tokenizer().decode(prompt(9, seed=1))]

    aio(scenario())


def test_several_requests_are_taken_together_or_not_at_all() -> None:
    async def scenario() -> None:
        async with bridged(rig_of(max_sequences=2), max_waiting=2) as bridge:
            with pytest.raises(InvalidRequest):
                bridge.submit(a_request("good"), Request(id="bad", prompt=(10**6,)))
            with pytest.raises(QueueFull):
                bridge.submit(*(a_request(str(i)) for i in range(5)))
            assert bridge.open_requests == bridge._sequences == 0
            told = await read(bridge.submit(*(a_request(str(i), replace(LONG, max_tokens=9)) for i in range(4))))
            assert {id for id, _ in told} == set("0123")
            assert all(len(each.tokens) == 9 for each in told.values())

    aio(scenario())


def test_one_of_several_that_the_engine_refuses_ends_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rig = rig_of()
        submit = rig.engine.submit

        def picky(request: Request) -> None:
            if request.id == "1":
                raise InvalidRequest("not this one")
            submit(request)

        monkeypatch.setattr(rig.engine, "submit", picky)
        async with bridged(rig) as bridge:
            async with bridge.submit(*(a_request(str(i)) for i in range(3))) as stream:
                with pytest.raises(InvalidRequest, match="not this one"):
                    async for _ in stream:
                        pass
            await bridge._idle.wait()

    aio(scenario())


@pytest.mark.parametrize(("interval", "most"), [(0.0, None), (1e9, 2)])
def test_fast_steps_travel_together(monkeypatch: pytest.MonkeyPatch, interval: float, most: int | None) -> None:
    """The first events and the last ones travel at once, whatever lies between waits for its turn."""
    crossings: list[int] = []

    async def play() -> None:
        rig = rig_of()
        async with bridged(rig, stream_interval=interval) as bridge:
            deliver = bridge._deliver

            def counted(events: list[TokenEvent], dead: str | None) -> None:
                crossings.append(len(events))
                deliver(events, dead)

            monkeypatch.setattr(bridge, "_deliver", counted)
            told = await read(bridge.submit(a_request()))
        assert tokens_of(told) == tokens_of(run(rig_of(), [a_request()]))

    aio(play())
    assert sum(crossings) > 20
    assert len(crossings) == (most or sum(crossings))
