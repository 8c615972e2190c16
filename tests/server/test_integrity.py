"""The check of an idle engine: when it runs, and what becomes of a server whose KV cache is inconsistent."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Callable

import pytest

from paceline.engine import thread as engine_thread
from paceline.errors import EngineDead
from paceline.llm import LLM
from paceline.types import Finish
from tests.server.alive import until
from tests.server.api import HELLO, serving
from tests.server.bridged import a_request, aio, bridged, read, rig_of


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_thread, "IDLE_CHECK_SECONDS", 0.01)


def counted(check: Callable[[], None], calls: list[str]) -> Callable[[], None]:
    def counting() -> None:
        calls.append(threading.current_thread().name)
        check()

    return counting


def test_an_idle_engine_is_checked_once_in_each_idle_period(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rig = rig_of()
        calls: list[str] = []
        monkeypatch.setattr(rig.engine, "check", counted(rig.engine.check, calls))
        async with bridged(rig) as bridge:
            for period in (1, 2, 3):
                await until(lambda period=period: len(calls) == period)  # type: ignore[misc]
                await asyncio.sleep(0.05)
                assert calls == ["engine"] * period, "by the thread of the engine, and not again"
                [told] = (await read(bridge.submit(a_request(str(period))))).values()
                assert told.finish is Finish.LENGTH
            assert (bridge.state, bridge.integrity_failures) == ("ready", 0)

    aio(scenario())


def test_an_idle_engine_improves_until_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """One piece of work at a time, so that an order waits for one at most."""

    async def scenario() -> None:
        rig = rig_of()
        left, done = [5, 0], []
        monkeypatch.setattr(rig.engine, "improve", lambda: done.append(len(left)) or len(done) < sum(left))
        async with bridged(rig) as bridge:
            await until(lambda: len(done) == 5)
            await asyncio.sleep(0.05)
            assert len(done) == 5, "it said that nothing is left"
            left[1] = 3
            [told] = (await read(bridge.submit(a_request("later")))).values()
            assert told.finish is Finish.LENGTH
            await until(lambda: len(done) == 8)

    aio(scenario())


def test_a_busy_engine_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rig = rig_of()
        calls: list[str] = []
        monkeypatch.setattr(engine_thread, "IDLE_CHECK_SECONDS", 30)
        monkeypatch.setattr(rig.engine, "check", counted(rig.engine.check, calls))
        async with bridged(rig) as bridge:
            for i in range(3):
                await read(bridge.submit(a_request(str(i))))
            assert not calls

    aio(scenario())


def test_a_leaked_page_is_found_and_the_server_says_so(log: io.StringIO) -> None:
    async def scenario() -> None:
        rig = rig_of()
        leaked = rig.cache.pool.take(1)
        async with bridged(rig) as bridge:
            await until(lambda: bridge.state == "dead")
            assert bridge.integrity_failures == 1
            assert bridge.dead is not None
            assert bridge.dead.startswith("integrity: page")
            with pytest.raises(EngineDead):
                bridge.submit(a_request())
            await asyncio.sleep(0.05)
            assert bridge.integrity_failures == 1, "once is enough"
            rig.cache.pool.give_back(leaked)

    aio(scenario())
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    assert [(line["level"], line["event"]) for line in lines] == [
        ("error", "the KV cache of an idle engine is inconsistent"),
        ("error", "engine died"),
    ]
    assert "has 1 references and 0 holders" in lines[1]["reason"]


def test_a_request_that_comes_during_a_check_that_fails_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rig = rig_of()
        began, go = threading.Event(), threading.Event()

        def fail() -> None:
            began.set()
            assert go.wait(timeout=30)
            raise AssertionError("pages lost")

        with monkeypatch.context() as patch:
            patch.setattr(rig.engine, "check", fail)
            async with bridged(rig) as bridge:
                await until(began.is_set)
                reading = asyncio.create_task(read(bridge.submit(a_request())))
                await asyncio.sleep(0)
                go.set()
                [told] = (await reading).values()
                assert (told.finish, bridge.state) == (Finish.ERROR, "dead")
                patch.undo()

    aio(scenario())


def test_over_http_a_leaked_page_is_503_and_counted(llm: LLM) -> None:
    pool = llm.engine._cache.pool
    leaked = pool.take(1)
    try:
        with serving(llm) as api:
            try:
                api.run(until(lambda: api.bridge.state == "dead"))
                assert api.get("/health").status_code == 503
                assert "paceline:integrity_failures_total" in api.get("/metrics").text
                response = api.post("/v1/chat/completions", {"messages": HELLO})
                assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_dead")
            finally:
                pool.give_back(leaked)
                llm.engine.dead = None
    finally:
        assert pool.held == 0
