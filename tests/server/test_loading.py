"""A server that listens before its model is loaded: what it says of that, and how it ends on the way."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.errors import ModelFileError
from paceline.llm import LLM
from paceline.models.weights import Progress
from paceline.server.bridge import Bridge
from paceline.server.loading import Loading
from paceline.server.process import ServerProcess, bind
from paceline.server.settings import Settings
from tests.cli.tiny_model import write_model
from tests.server.alive import PATIENCE, Alive, until
from tests.server.api import check_error

pytestmark = pytest.mark.usefixtures("log")
MESSAGE = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


class Gate:
    """A loader that reports a quarter and waits to be let through."""

    def __init__(self, llm: LLM | Exception) -> None:
        self.llm, self.opened = llm, threading.Event()

    def __call__(self, progress: Progress) -> LLM:
        progress(1, 4)
        while not self.opened.wait(0.001):
            progress(1, 4)
        progress(4, 4)
        if isinstance(self.llm, Exception):
            raise self.llm
        return self.llm


def starting(gate: Gate, play: Callable[[Alive, asyncio.Task[None]], Any], **options: Any) -> None:
    async def whole() -> None:
        settings, ready = Settings(port=0, **options), asyncio.Event()
        with bind(settings) as listener:
            process = ServerProcess(Bridge(model="tiny"), settings, source=None, announce=ready.set, load=gate)
            running = asyncio.create_task(process.run(listener))
            await process.server.listening.wait()
            server = Alive(process, listener.getsockname()[1])
            await until(lambda: process.bridge.loading.percent == 25)
            await play(server, running)
            await server.http.aclose()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(asyncio.wait_for(whole(), PATIENCE))


def test_it_answers_while_it_loads(llm: LLM) -> None:
    gate = Gate(llm)

    async def play(server: Alive, running: asyncio.Task[None]) -> None:
        state = {"status": "starting", "percent": 25, "doing": "reading the weights of the target"}
        health, ready = await server.http.get("/health"), await server.http.get("/ready")
        assert (health.status_code, health.json()) == (200, state)
        assert (ready.status_code, ready.json()) == (503, state)
        assert int(ready.headers["retry-after"]) >= 1
        for response in (
            await server.http.post("/v1/chat/completions", json=MESSAGE),
            await server.http.post("/tokenize", json={"prompt": "abc"}),
            await server.http.get("/v1/models"),
            await server.http.get("/v1/speculation"),
        ):
            assert response.status_code == 503, response.text
            assert check_error(response)["code"] == "not_ready"
            assert "25 % loaded" in response.json()["error"]["message"]
            assert int(response.headers["retry-after"]) >= 1
        assert 'state="starting"} 1.0' in (await server.http.get("/metrics")).text.replace('model_name="tiny",', "")
        assert (await server.http.post("/v1/chat/completions", json={})).status_code == 400
        gate.opened.set()
        await until(lambda: server.process.bridge.state == "ready")
        assert (await server.http.get("/ready")).json() == {"status": "ready"}
        assert (await server.http.post("/v1/chat/completions", json=MESSAGE)).status_code == 200
        server.process.stop()
        await running

    starting(gate, play)


def test_guards_stand_before_the_model(llm: LLM) -> None:
    gate = Gate(llm)

    async def play(server: Alive, running: asyncio.Task[None]) -> None:
        assert (await server.http.get("/v1/models")).status_code == 401
        assert (await server.http.get("/health", headers={"host": "a b"})).status_code == 400
        assert (await server.http.get("/health")).status_code == 200
        gate.opened.set()
        await until(lambda: server.process.bridge.state == "ready")
        server.process.stop()
        await running

    starting(gate, play, api_keys=("sk-1",))


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    gate = Gate(ModelFileError("the file is torn"))

    async def play(server: Alive, running: asyncio.Task[None]) -> None:
        gate.opened.set()
        with pytest.raises(ModelFileError, match="torn"):
            await running

    starting(gate, play)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_loading(llm: LLM, number: signal.Signals) -> None:
    async def play(server: Alive, running: asyncio.Task[None]) -> None:
        os.kill(os.getpid(), number)
        await running
        assert "loading" not in {thread.name for thread in threading.enumerate()}
        assert server.process.bridge.state == "draining"

    starting(Gate(llm), play)


def test_progress_in_words() -> None:
    now = [0.0]
    loading = Loading(clock=lambda: now[0])
    assert (loading.percent, loading.retry_after) == (0, 1)
    now[0] = 10.0
    loading(1, 5)
    assert (loading.percent, loading.retry_after) == (20, 40)
    loading(5, 5)
    assert (loading.percent, loading.doing, loading.retry_after) == (100, "preparing the engine", 1)
    loading(1, 8)
    assert (loading.percent, loading.doing) == (12, "reading the weights of a drafter")
    now[0] = 500.0
    assert loading.retry_after == 60


def test_the_command_says_one_line_and_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    assert main(["serve", str(model), "--port", "0"]) == 2
    err = capsys.readouterr().err
    assert err.splitlines()[-1].startswith("paceline: error: ")
    assert "Traceback" not in err
