"""Requests a minute and at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paceline.server.guards.check import Refusal
from paceline.server.guards.rates import MAX_CALLERS, Rates
from paceline.server.live import CurrentSettings
from paceline.server.settings import Settings
from tests.server.guarded import KEY, aio, an_app, ask, call, refused


def test_requests_a_minute() -> None:
    now = 1000.0
    rates = Rates(_no_app, CurrentSettings(Settings(requests_per_minute_per_key=2)), clock=lambda: now)
    caller = rates._caller("a")
    rates._check(caller)
    now += 20.5
    rates._check(caller)
    with pytest.raises(Refusal, match="2 requests a minute") as caught:
        rates._check(caller)
    assert caught.value.headers == {"Retry-After": "40"}
    rates._check(rates._caller("b"))
    now += 39.5
    rates._check(caller)
    with pytest.raises(Refusal):
        rates._check(caller)


async def _no_app(*args: Any) -> None: ...


def test_too_many_requests_say_when_to_come_again() -> None:
    app = an_app(requests_per_minute_per_key=2, api_keys=(KEY, "sk-other"))
    mine, other = ({"authorization": f"Bearer {key}"} for key in (KEY, "sk-other"))
    for _ in range(2):
        assert ask(app, json={}, headers=mine).status_code == 200
    response = ask(app, json={}, headers=mine)
    refused(response, 429)
    assert 1 <= int(response.headers["retry-after"]) <= 60
    assert ask(app, json={}, headers=other).status_code == 200
    assert ask(app, "GET", "/v1/models", headers=mine).status_code == 200


def test_requests_at_once() -> None:
    app = an_app(max_concurrency_per_key=1)

    async def scenario() -> None:
        inside, leave = asyncio.Event(), asyncio.Event()

        @app.post("/v1/slow")
        async def slow() -> dict[str, bool]:
            inside.set()
            await leave.wait()
            return {"fine": True}

        first = asyncio.create_task(call(app, "POST", "/v1/slow", json={}))
        await inside.wait()
        second = await call(app, "POST", "/v1/echo", json={})
        refused(second, 429)
        assert second.headers["retry-after"] == "1"
        leave.set()
        assert (await first).status_code == 200
        assert (await call(app, "POST", "/v1/echo", json={})).status_code == 200

    aio(scenario())


def test_a_request_that_failed_does_not_run_for_ever() -> None:
    app = an_app(max_concurrency_per_key=1)

    @app.post("/v1/boom")
    async def boom() -> None:
        raise RuntimeError("unforeseen")

    for _ in range(2):
        refused(ask(app, path="/v1/boom", json={}), 500)


def test_quiet_callers_are_forgotten() -> None:
    now = 0.0
    rates = Rates(_no_app, CurrentSettings(Settings(requests_per_minute_per_key=2)), clock=lambda: now)
    for i in range(MAX_CALLERS):
        rates._check(rates._caller(str(i)))
    now += 61
    rates._caller("0").running = 1
    rates._caller("one more")
    assert set(rates.callers) == {"0", "one more"}
