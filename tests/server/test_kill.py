"""Whatever happens in the middle of a load, every request ends exactly once, and those that survive say the same.

At the size of a toy; clients/kill.py does the same to a server with a real model in a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.errors import EngineDead
from paceline.llm import LLM
from paceline.runner.parallel.forward import SplitForward
from tests.server.alive import PATIENCE, Alive, scenario, until
from tests.server.api import tiny_llm

pytestmark = pytest.mark.usefixtures("log")
COUNT, TOKENS = 8, 32
SAMPLING = ({"temperature": 0}, {"temperature": 0.9, "top_p": 0.9}, {"temperature": 1.0, "presence_penalty": 0.5})


@dataclass(frozen=True)
class End:
    """How a request ended: its status, what came of its text, and every word that was an end."""

    status: int
    text: str
    ends: tuple[str, ...]


def body(index: int, tokens: int = TOKENS) -> dict[str, Any]:
    """Of a stream; those with another index say something else."""
    prompt = "abcabcabc" + chr(ord("a") + index) * 3
    shared = {"max_tokens": tokens, "ignore_eos": True, "stream": True, "seed": index}
    return {"prompt": prompt, **shared, **SAMPLING[index % len(SAMPLING)]}


async def stream(server: Alive, index: int, tokens: int = TOKENS) -> End:
    headers = {"x-request-id": f"r-{index}"}
    response = await server.http.post("/v1/completions", json=body(index, tokens), headers=headers)
    if response.status_code != 200:
        return End(response.status_code, "", (response.json()["error"]["code"],))
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    choices = [choice for event in events for choice in event.get("choices", ())]
    ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    ends += [event["error"]["code"] for event in events if "error" in event]
    return End(200, "".join(choice["text"] for choice in choices), tuple(ends))


async def load(server: Alive, tokens: int = TOKENS) -> list[asyncio.Task[End]]:
    """All streams at once, when the engine knows of them."""
    running = [asyncio.create_task(stream(server, index, tokens)) for index in range(COUNT)]
    await until(lambda: server.process.bridge.open_requests == COUNT or any(task.done() for task in running))
    return running


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[str]:
    """What each says alone. All the toys here have the same weights."""
    found: list[str] = []

    async def play(server: Alive) -> None:
        found.extend([(await stream(server, index)).text for index in range(COUNT)])

    scenario(llm, play)
    assert len(set(found)) == COUNT
    return found


def survived(alone: list[str]) -> list[End]:
    return [End(200, text, ("length",)) for text in alone]


def logged_once(how: str) -> dict[str, list[str]]:
    return {f"r-{index}": [how] for index in range(COUNT)}


def ends_in(log: io.StringIO) -> dict[str, list[str]]:
    """Of each request with an id of ours, every line's word for its end."""
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    found: dict[str, list[str]] = {}
    for line in lines:
        if line.get("request_id", "").startswith("r-"):
            found.setdefault(line["request_id"], []).append(line.get("finish", "none"))
    return found


def test_a_signal_under_load(llm: LLM, alone: list[str], log: io.StringIO) -> None:
    async def play(server: Alive) -> None:
        running = await load(server)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: server.process.bridge.state == "draining")
        with contextlib.suppress(httpx.HTTPError):  # they may have been quick, and the server gone
            assert (await stream(server, 99)).status == 503
        assert await asyncio.gather(*running) == survived(alone)
        await until(lambda: server.process.server.should_exit)
        del (ends := ends_in(log))["r-99"]
        assert ends == logged_once("length")

    scenario(llm, play)


def test_a_second_signal_under_load(
    llm: LLM, alone: list[str], log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(server: Alive) -> None:
        gate = Gate(llm, monkeypatch)
        running = await load(server, tokens=200)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: server.process.bridge.state == "draining")
        gate.let_pass(20)
        await until(lambda: gate.passes == 0)
        os.kill(os.getpid(), signal.SIGTERM)
        gate.open()
        for end, text in zip(await asyncio.gather(*running), alone, strict=True):
            assert (end.status, end.ends) == (200, ("aborted",))
            assert end.text[: len(text)] == text[: len(end.text)]
        assert ends_in(log) == logged_once("abort")

    scenario(llm, play, drain_timeout=1000.0)


class Gate:
    """An engine whose steps do nothing unless they are let."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes: float = 0
        self._step = llm.engine.step
        monkeypatch.setattr(llm.engine, "step", self._pass)

    def let_pass(self, steps: float) -> None:
        self.passes = steps

    def open(self) -> None:
        self.passes = float("inf")

    def _pass(self) -> list[Any]:
        if not self.passes:
            return []
        self.passes -= 1
        return self._step()


def test_a_failure_under_load(
    tmp_path: Path, alone: list[str], monkeypatch: pytest.MonkeyPatch, log: io.StringIO
) -> None:
    llm = tiny_llm(tmp_path, max_sequences=4)
    step, steps = llm.engine._step, iter(range(1000))

    def fails() -> None:
        if next(steps) == 15:
            raise RuntimeError("a bolt is loose in /secret")
        step()

    async def play(server: Alive) -> None:
        monkeypatch.setattr(llm.engine, "_step", fails)
        ends = await asyncio.gather(*(stream(server, index, tokens=200) for index in range(COUNT)))
        for end, text in zip(ends, alone, strict=True):
            assert end.status == 200 or (end.status in (500, 503) and not end.text)  # before the first token, or after
            assert end.ends in (("engine_error",), ("engine_dead",)), "one end"
            assert end.text[: len(text)] == text[: len(end.text)]
        assert any(end.text for end in ends), "some had begun"
        assert any(end.status != 200 for end in ends), "some had not"
        logged = ends_in(log)
        assert set(logged) == {f"r-{index}" for index in range(COUNT)}
        assert all(words in (["error"], ["none"]) for words in logged.values()), "none: the engine was dead already"
        assert (await stream(server, COUNT)).status == 503

    scenario(llm, play)


@pytest.mark.parametrize(
    ("requests", "number", "patience", "said"),
    [
        (COUNT, signal.SIGKILL, float(PATIENCE), "rank 1 was killed by SIGKILL"),
        pytest.param(COUNT, signal.SIGSTOP, 2.0, "rank 1 is stuck: no answer for 2 s", marks=pytest.mark.slow),
        pytest.param(0, signal.SIGKILL, float(PATIENCE), "rank 1 was killed by SIGKILL", marks=pytest.mark.slow),
        (0, signal.SIGSTOP, 2.0, "rank 1 is stuck: no answer for 2 s"),
    ],
)
def test_a_rank_is_lost(
    tmp_path: Path, log: io.StringIO, requests: int, number: signal.Signals, patience: float, said: str
) -> None:
    """Under load every request ends once; with a load or without, the server ends with the cause."""
    llm = tiny_llm(tmp_path, tensor_parallel=2, rank_timeout=patience)
    forward = llm.parts.context.target
    assert isinstance(forward, SplitForward)

    async def play(server: Alive) -> None:
        running = await load(server, tokens=200) if requests else []
        await until(lambda: not requests or llm.engine.stats.steps > 5)
        os.kill(forward.ranks.pids()[1], number)
        for end in await asyncio.gather(*running):
            assert end.ends in (("engine_error",), ("engine_dead",)), "one end"
        await until(lambda: server.process.server.should_exit)

    with pytest.raises(EngineDead, match=f"{said}; start the server anew"):
        scenario(llm, play)
    assert set(ends_in(log)) == {f"r-{index}" for index in range(requests)}
    assert said in log.getvalue() or not requests


def test_a_full_queue_under_load(tmp_path: Path, alone: list[str]) -> None:
    llm = tiny_llm(tmp_path, max_sequences=2)

    async def play(server: Alive) -> None:
        responses: list[httpx.Response] = []
        server.http.event_hooks["response"].append(lambda response: _keep(response, responses))
        ends = await asyncio.gather(*(stream(server, index) for index in range(COUNT)))
        assert Counter(end.status for end in ends) == {200: 2 + 3, 429: COUNT - 5}
        for end, text in zip(ends, alone, strict=True):
            assert end in (End(200, text, ("length",)), End(429, "", ("queue_full",)))
        waits = [response.headers.get("retry-after") for response in responses if response.status_code == 429]
        assert all(wait is not None and 1 <= int(wait) <= 60 for wait in waits)
        assert await stream(server, 0) == survived(alone)[0], "there is room again"

    scenario(llm, play, max_waiting=3)


async def _keep(response: httpx.Response, responses: list[httpx.Response]) -> None:
    responses.append(response)


def test_pages_run_out_under_load(tmp_path: Path, alone: list[str], log: io.StringIO) -> None:
    llm = tiny_llm(tmp_path, kv_memory=100_000)

    async def play(server: Alive) -> None:
        before = llm.engine.stats.preemptions
        running = await load(server)
        assert await asyncio.gather(*running) == survived(alone)
        assert llm.engine.stats.preemptions > before
        assert ends_in(log) == logged_once("length")

    scenario(llm, play)


def test_a_storm_of_clients_that_leave(llm: LLM, alone: list[str], log: io.StringIO) -> None:
    async def leave(server: Alive, index: int, *, read: int) -> None:
        content = json.dumps(body(index % COUNT, 200)).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"X-Request-Id: r-left-{index}\r\nContent-Length: {len(content)}\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head.encode() + content)
        await reader.readexactly(read)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def play(server: Alive) -> None:
        reads = [(0, 1, 900)[index % 3] for index in range(60)]
        storm = asyncio.gather(*(leave(server, index, read=read) for index, read in enumerate(reads)))
        assert await asyncio.gather(*(stream(server, index) for index in range(COUNT))) == survived(alone)
        await storm
        heard = {f"r-left-{index}" for index, read in enumerate(reads) if read}
        await until(lambda: heard | logged_once("").keys() <= ends_in(log).keys())
        left = {name: words for name, words in ends_in(log).items() if "left" in name}
        assert all(words in (["abort"], ["length"]) or name not in heard for name, words in left.items())
        assert all(len(words) == 1 for words in left.values())
        assert ["abort"] in left.values()
        logged = {name: words for name, words in ends_in(log).items() if name not in left}
        assert logged == logged_once("length")

    scenario(llm, play)
