"""The engine behind asyncio: the same tokens, what is taken and what is refused, and what is told of it."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.errors import InvalidRequest, NotReady, QueueFull
from paceline.server import logs
from paceline.server.bridge import Bridge
from paceline.types import Finish, Request, SamplingParams, TokenEvent
from tests.runs import GREEDY, SAMPLED, mixed_requests, prompt, run, tokens_of
from tests.server.bridged import LONG, Gate, a_request, aio, bridged, read, rig_of
from tests.tiny_models import tiny_tokenizer


@pytest.mark.unwatched
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
            rig.engine.step = counted
            deliver = bridge._deliver

            def counting(*args: Any) -> None:
                nonlocal calls
                calls += 1
                deliver(*args)

            bridge._deliver = counting
            streams = [bridge.submit(a_request(str(i), replace(LONG, max_tokens=20))) for i in range(6)]
            gate.opened.set()
            await asyncio.gather(*map(read, streams))
            assert calls <= steps
            assert steps < 6 * 20

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
    def refuse(request: Request, *, validated: bool) -> None:
        raise InvalidRequest("no such grammar")

    async def scenario() -> None:
        rig = rig_of()
        async with bridged(rig) as bridge:
            rig.engine.submit = refuse
            with pytest.raises(InvalidRequest, match="no such grammar"):
                await read(bridge.submit(a_request(sampling=replace(LONG, n=2))))
            assert bridge.state == "ready"
            assert bridge._sequences == 0, "both samples leave the queue"

    aio(scenario())


def test_a_request_is_checked_once_and_not_on_the_thread_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rig = rig_of()
        checked: list[str] = []
        validate = rig.engine.validate

        def noted(request: Request) -> None:
            checked.append(threading.current_thread().name)
            validate(request)

        monkeypatch.setattr(rig.engine, "validate", noted)
        async with bridged(rig) as bridge:
            await read(bridge.submit(a_request()))
        assert checked == [threading.main_thread().name]

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

        def picky(request: Request, *, validated: bool) -> None:
            if request.id == "1":
                raise InvalidRequest("not this one")
            submit(request, validated=validated)

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
