"""`paceline run`: a conversation here and a server for others, on one engine."""

from __future__ import annotations

import json
import socket
import threading
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from paceline.cli.run import _listen
from paceline.errors import InvalidRequest
from paceline.llm import LLM
from paceline.server.background import serving
from paceline.server.process import bind
from paceline.server.settings import Settings
from paceline.types import SamplingParams, Speculation
from tests.cli.conftest import Cli

FLAGS = ("--format", "fp32", "--temperature", "0", "--max-tokens", "30", "--ignore-eos")


class Input:
    """Lines that are typed; a function among them is called when its turn comes."""

    def __init__(self, *steps: str | Callable[[], None]) -> None:
        self._steps = iter(steps)

    def isatty(self) -> bool:
        return False

    def readline(self) -> str:
        for step in self._steps:
            if isinstance(step, str):
                return f"{step}\n"
            step()
        return ""


def ask(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=200) as answer:
        return json.load(answer)


def test_the_terminal_and_clients_get_the_same_answers(cli: Cli, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    urls: list[str] = []
    monkeypatch.setattr("webbrowser.open", urls.append)
    said: dict[str, Any] = {}

    def client() -> None:
        said["models"] = ask(f"{urls[0]}/v1/models")
        body = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 30}
        said["chat"] = ask(f"{urls[0]}/v1/chat/completions", body | {"ignore_eos": True})

    monkeypatch.setattr("sys.stdin", Input("hello", client, "/stats", "/exit", "never asked"))
    status, out, err = cli("run", tiny, *FLAGS, "--port", "0", "--open")
    assert status == 0
    assert err == f"playground {urls[0]} · base_url {urls[0]}/v1\n"
    answer = said["chat"]["choices"][0]["message"]["content"]
    assert out.startswith(f"{answer}\n")
    assert "last answer   30 tokens" in out
    assert said["models"]["data"][0]["id"] == tiny.rpartition("/")[2]
    assert not any(thread.name.startswith(("server", "engine")) for thread in threading.enumerate())


def test_leaving_an_answer_aborts_it_and_errors_come_back(tiny: str) -> None:
    llm = LLM(tiny, drafter=[], format="fp32")
    settings = Settings(port=0, drain_timeout=0.0)
    with bind(settings) as listener, serving(llm, settings, listener=listener, name="tiny") as speaker:
        prompt = speaker.encode_chat([{"role": "user", "content": "hello"}])
        events = speaker.stream(prompt, SamplingParams(max_tokens=100, ignore_eos=True), speculation=Speculation())
        next(events)
        events.close()  # type: ignore[attr-defined] - a generator
        with pytest.raises(InvalidRequest, match="prompt"):
            speaker.stream(prompt * 100, SamplingParams(), speculation=Speculation())
    assert not llm.engine.has_work


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidRequest, match="choose another with --port"):
            _listen(port)
        monkeypatch.setattr(Settings, "__init__", _on(port))
        with _listen(None) as listener:
            assert listener.getsockname()[1] != port


def _on(usual: int) -> Callable[..., None]:
    """The constructor of settings whose usual port is another."""
    plain = Settings.__init__

    def init(self: Settings, **options: Any) -> None:
        plain(self, **{"port": usual} | options)

    return init
