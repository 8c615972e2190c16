"""Tenants over HTTP: API keys are served alike, and only the admin sees who was served how much."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from paceline.llm import LLM
from paceline.server.tenants import Tenants
from paceline.types import Finish, Request, SamplingParams, SequenceStats, TokenEvent
from tests.server.api import Api, serving, tiny_llm

FLOOD, ONE, ADMIN = "sk-flood", "sk-one", "sk-admin"


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:12]


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A model with one lane: requests end in the order in which they are admitted."""
    return tiny_llm(tmp_path_factory.mktemp("narrow"), max_sequences=1)


@contextmanager
def keyed(llm: LLM, **settings: Any) -> Iterator[Api]:
    with serving(llm, api_keys=(FLOOD, ONE), admin_key=ADMIN, **settings) as api:
        yield api


def asking(api: Api, key: str, path: str = "/v1/completions", **fields: Any) -> Any:
    body = {"prompt": "abcabcabc", "max_tokens": 4, "ignore_eos": True} | fields
    return api.http.post(path, json=body, headers={"authorization": f"Bearer {key}"})


async def settled(api: Api, count: int) -> None:
    """Wait until so many requests are taken."""
    while api.bridge.open_requests < count:
        await asyncio.sleep(0.001)


def admin(api: Api) -> dict[str, Any]:
    response = api.run(api.http.get("/admin/tenants", headers={"authorization": f"Bearer {ADMIN}"}))
    assert response.status_code == 200, response.text
    told: dict[str, Any] = response.json()
    return told


@contextmanager
def held(api: Api) -> Iterator[asyncio.Event]:
    """The engine takes requests, and steps only once the event is set."""
    engine, opened = api.bridge.llm.engine, asyncio.Event()
    step, idle = engine.step, list[TokenEvent]()
    engine.step = lambda: step() if opened.is_set() else idle  # type: ignore[method-assign]
    try:
        yield opened
    finally:
        engine.step = step  # type: ignore[method-assign]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_one_request_of_another_key_is_served_beside_a_flood(narrow: LLM, path: str) -> None:
    """Forty requests of one key wait. That of another key comes last, and only one is served before it."""
    ended: list[str] = []

    async def one(api: Api, key: str, i: int) -> None:
        fields = {"input": f"text {i}"} if path == "/v1/embeddings" and key == ONE else {"prompt": f"{i} abc"}
        response = await asking(api, key, path if key == ONE else "/v1/completions", **fields)
        assert response.status_code == 200, response.text
        ended.append(key)

    async def scenario(api: Api) -> None:
        with held(api) as opened:
            flood = [asyncio.create_task(one(api, FLOOD, i)) for i in range(40)]
            await settled(api, 40)
            last = asyncio.create_task(one(api, ONE, 0))
            await settled(api, 41)
            opened.set()
            await asyncio.gather(*flood, last)

    with keyed(narrow) as api:
        api.run(scenario(api))
        assert ended.index(ONE) <= 2  # one of the flood is first, and answers may overtake each other by one
        told = admin(api)
    assert told.keys() == {digest(FLOOD), digest(ONE)}
    assert (told[digest(FLOOD)]["answers"], told[digest(ONE)]["answers"]) == (40, 1)


def test_the_admin_sees_what_tenants_were_served(llm: LLM) -> None:
    with keyed(llm) as api:
        for key, count, samples in ((FLOOD, 3, 2), (ONE, 1, 1)):
            for _ in range(count):
                assert api.run(asking(api, key, n=samples)).status_code == 200
        told = admin(api)
        served = told[digest(FLOOD)]
        assert (served["answers"], served["output_tokens"], served["open"]) == (6, 24, 0)
        assert served["prompt_tokens"] == 3 * told[digest(ONE)]["prompt_tokens"] > 0
        assert (served["waiting"], served["running"], served["counter"]) == (0, 0, 0)
        for key in (FLOOD, ONE):
            assert key not in str(told)
        for key in (FLOOD, ONE):  # who reads metrics by a key sees no other's
            metrics = api.run(api.http.get("/metrics", headers={"authorization": f"Bearer {key}"}))
            assert digest(FLOOD) not in metrics.text
            refused = api.run(api.http.get("/admin/tenants", headers={"authorization": f"Bearer {key}"}))
            assert refused.status_code == 401


def test_without_keys_all_are_one_tenant(llm: LLM) -> None:
    with serving(llm, admin_key=ADMIN) as api:
        api.complete()
        transport = httpx.ASGITransport(app=api.app, client=("1.2.3.4", 5))

        async def elsewhere() -> None:
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                assert (await client.post("/v1/completions", json={"prompt": "abc"})).status_code == 200

        api.run(elsewhere())
        assert {name: each["answers"] for name, each in admin(api).items()} == {"default": 2}


def test_a_flood_shuts_no_other_key_out(narrow: LLM) -> None:
    """The queue is full of one key's requests. Another key still has its share of it, and no more."""

    async def scenario(api: Api) -> None:
        with held(api) as opened:
            flood = [asyncio.create_task(asking(api, FLOOD)) for _ in range(5)]
            await settled(api, 5)
            assert (await asking(api, FLOOD)).status_code == 429
            others = [asyncio.create_task(asking(api, ONE)) for _ in range(2)]
            await settled(api, 7)
            assert (await asking(api, ONE)).status_code == 429
            opened.set()
            answers = await asyncio.gather(*flood, *others)
            assert [answer.status_code for answer in answers] == [200] * 7

    with keyed(narrow, max_waiting=4) as api:
        api.bridge.max_waiting = 4
        api.run(scenario(api))


def a_request(tenant: str, n: int = 1) -> Request:
    return Request(id="r", prompt=(1,), sampling=SamplingParams(n=n), tenant=tenant)


def test_shares_of_a_full_queue() -> None:
    tenants = Tenants()
    assert not tenants.keeps_to_share([a_request("a")], places=0)
    assert tenants.keeps_to_share([a_request("a", 9)], places=1)  # there is room for one, and the others are taken
    assert not tenants.keeps_to_share([a_request("a"), a_request("a")], places=1)
    for name in "abc":
        tenants.take(a_request(name, 2))
    assert tenants.keeps_to_share([a_request("a")], places=9)
    assert not tenants.keeps_to_share([a_request("a")], places=8)
    assert not tenants.keeps_to_share([a_request("d")], places=3)
    for sample in range(2):
        tenants.end(a_request("b", 2), TokenEvent("r", sample, finish=Finish.ABORT, stats=SequenceStats()))
    tenants.refuse(a_request("c", 2), 2)
    assert tenants.keeps_to_share([a_request("d")], places=2)
