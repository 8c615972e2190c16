"""A replica without Ray: its front, its statistics, its settings, its health and its end."""

from __future__ import annotations

import asyncio
import io
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline import __version__
from paceline.cluster.pace import Pace
from paceline.cluster.replica import Replica
from paceline.errors import EngineDead, InvalidRequest
from paceline.llm import LLM
from paceline.server import logs
from tests.server.api import tiny_llm

PROMPT = {"prompt": "abc" * 20, "max_tokens": 12, "temperature": 1.0, "seed": 3}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_llm(tmp_path_factory.mktemp("replica"))


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> io.StringIO:
    """The log of the replicas; their state is kept apart."""
    stream, start_log = io.StringIO(), logs.start_log
    monkeypatch.setattr(logs, "start_log", lambda **options: start_log(stream=stream, **options))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return stream


class Played:
    """A replica and a client of it."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        transport = httpx.ASGITransport(app=replica.front())
        self.http = httpx.AsyncClient(transport=transport, base_url="http://any.name")

    async def complete(self, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json=PROMPT | fields, headers=headers)


async def started(llm: LLM, name: str = "r1", *, version: str = __version__, **fixed: Any) -> Played:
    replica = Replica()
    await replica.start(
        name=name,
        version=version,
        cluster={"cpus": 2.0},
        fixed={"model": "tiny"} | fixed,
        load=lambda given, progress: llm,
    )
    return Played(replica)


def play(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 200))


def test_answers_name_their_replica(llm: LLM) -> None:
    async def work() -> None:
        one = await started(llm)
        answer = await one.complete()
        assert (answer.status_code, answer.headers["x-paceline-replica"]) == (200, "r1")
        assert answer.json()["model"] == "tiny"
        streamed = await one.complete(stream=True)
        assert streamed.headers["x-paceline-replica"] == "r1"
        assert streamed.text.endswith("data: [DONE]\n\n")
        refused = await one.complete(max_tokens=-1)
        assert (refused.status_code, refused.headers["x-paceline-replica"]) == (400, "r1")
        await one.replica.close()

    play(work())


def test_chunks_of_streams_go_at_their_pace(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[int] = []

    def rest(pace: Pace) -> float:
        rests.append(pace.open)
        return 0.0

    monkeypatch.setattr(Pace, "rest", property(rest))

    async def work() -> None:
        one = await started(llm)
        await one.complete()
        assert rests == []
        await one.complete(stream=True)
        assert set(rests) == {1}
        await one.replica.close()

    play(work())


def test_a_request_for_another_replica_is_refused(llm: LLM) -> None:
    async def work() -> None:
        one = await started(llm)
        assert (await one.complete({"x-paceline-replica": "r1"})).status_code == 200
        wrong = await one.complete({"x-paceline-replica": "r2"})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (421, "wrong_replica")
        assert wrong.headers["x-paceline-replica"] == "r1"
        await one.replica.close()

    play(work())


def test_a_seeded_request_gives_the_same_text_from_every_replica(llm: LLM, tmp_path: Path) -> None:
    async def texts(played: Played) -> list[str]:
        answers = [await played.complete(seed=seed) for seed in range(4)]
        return [answer.json()["choices"][0]["text"] for answer in answers]

    async def work() -> None:
        (tmp_path / "m").mkdir()
        one, other = await started(llm), await started(tiny_llm(tmp_path / "m"), "r2")
        found = await texts(one), await texts(other)
        assert found[0] == found[1]
        assert len(set(found[0])) > 1
        await one.replica.close()
        await other.replica.close()

    play(work())


def test_an_application_below_a_prefix_has_the_same_paths(llm: LLM) -> None:
    async def work() -> None:
        one = await started(llm)
        transport = httpx.ASGITransport(app=one.replica.front(), root_path="/small")
        async with httpx.AsyncClient(transport=transport, base_url="http://any.name") as http:
            assert (await http.get("/small/ready")).json() == {"status": "ready"}
            assert (await http.post("/small/v1/completions", json=PROMPT)).status_code == 200
            assert (await http.get("/small")).status_code == 200
        await one.replica.close()

    play(work())


def test_one_scrape_shows_all_replicas(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's proxies give a scrape to any replica: without the others' counts, a series would jump between them."""

    async def work() -> None:
        (tmp_path / "m").mkdir()
        one, other = await started(llm), await started(tiny_llm(tmp_path / "m"), "r2")

        async def ask_all(method: str) -> list[Any]:
            return [await getattr(each.replica, method)() for each in (one, other)]

        monkeypatch.setattr(one.replica, "ask_all", ask_all)
        monkeypatch.setattr(other.replica, "ask_all", ask_all)
        for played, count in ((one, 1), (other, 3)):
            for _ in range(count):
                await played.complete()
        pages = [(await played.http.get("/metrics")).text for played in (one, other)]
        for page in pages:
            families = {family.name: family for family in text_string_to_metric_families(page)}
            ended = families["vllm:request_success"].samples
            counts = Counter[str]()
            for each in ended:
                counts[each.labels["replica"]] += int(each.value)
            assert counts == {"r1": 1, "r2": 3}
            assert page.count("# TYPE vllm:request_success_total ") == 1, "each family stands once"
        assert families.keys() == {family.name for family in (await one.replica.collected())[1]}
        await one.replica.close()
        await other.replica.close()

    play(work())


def test_a_scrape_needs_a_key_where_requests_do(llm: LLM) -> None:
    async def work() -> None:
        one = await started(llm, api_keys=["secret"])
        assert (await one.http.get("/metrics")).status_code == 401
        found = await one.http.get("/metrics", headers={"authorization": "Bearer secret"})
        assert found.status_code == 200
        assert 'replica="r1"' in found.text
        await one.replica.close()

    play(work())


def test_routers_are_told_what_was_read(llm: LLM) -> None:
    async def work() -> None:
        one = await started(llm)
        assert one.replica.record_routing_stats() == {"beginnings": [], "uses": 0}
        await one.complete({"x-paceline-prefix": "h1,h2"})
        await one.complete({"x-paceline-prefix": "h1,h3"})
        await one.complete({"x-paceline-prefix": ""})
        assert one.replica.record_routing_stats() == {"beginnings": ["h2", "h1", "h3"], "uses": 4}
        await one.replica.close()

    play(work())


def test_a_missing_door_is_said_once(llm: LLM, said: io.StringIO) -> None:
    async def work() -> None:
        one = await started(llm)
        await one.complete({"x-paceline-prefix": ""})
        assert "without a door" not in said.getvalue()
        await one.complete()
        await one.complete()
        await one.replica.close()

    play(work())
    assert said.getvalue().count("proxy without a door") == 1
    assert "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=paceline.cluster.door.middlewares" in said.getvalue()


def test_the_autoscaler_is_told_the_load(llm: LLM) -> None:
    async def work() -> None:
        one = await started(llm)
        found = one.replica.record_autoscaling_stats()
        places = float(llm.engine.max_sequences)
        assert found == {"running": 0.0, "waiting": 0.0, "kv_usage": 0.0, "places": places}
        await one.replica.close()

    play(work())


def test_settings_change_while_it_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        one = await started(llm, max_waiting=9)
        await one.replica.reconfigure({"max_waiting": 3, "allowed_rules": ["coupled"]})
        assert one.replica.bridge.max_waiting == 3
        assert (await one.complete(speculation={"rule": "block"})).status_code == 400
        await one.replica.reconfigure(None)
        assert one.replica.bridge.max_waiting == 9
        monkeypatch.setenv("PACELINE_API_KEYS", "secret")
        await one.replica.reconfigure({})
        assert (await one.complete()).status_code == 401
        with pytest.raises(InvalidRequest, match="unknown option"):
            await one.replica.reconfigure({"max_wating": 3})
        assert one.replica.bridge.max_waiting == 9
        await one.replica.close()

    play(work())


def test_a_dead_engine_fails_the_health_check(llm: LLM) -> None:
    async def work() -> None:
        one = await started(llm)
        await one.replica.check_health()
        one.replica.bridge._die("a planted fault")
        with pytest.raises(EngineDead, match="replica r1 stopped: a planted fault"):
            await one.replica.check_health()
        await one.replica.close()

    play(work())


def test_nodes_with_another_version_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=rf"made by Paceline 0\.0\.1, and this node has {__version__}"):
        play(started(llm, version="0.0.1"))  # type: ignore[arg-type]
