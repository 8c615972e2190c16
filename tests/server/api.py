"""The whole server in this process, around a tiny random model: requests go in as HTTP, and come out of the app."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx

from paceline.llm import LLM
from paceline.server.app import create_app
from paceline.server.bridge import Bridge
from paceline.server.settings import Settings
from paceline.server.traces import Tracer
from tests.cli.tiny_model import write_model

T = TypeVar("T")

MODEL = "tiny"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello, hello, hello"}]


class Api:
    def __init__(
        self, bridge: Bridge, settings: Settings, runner: asyncio.Runner, *, tracer: Tracer | None = None
    ) -> None:
        self.bridge = bridge
        self.app = create_app(bridge, settings, tracer=tracer)
        self._runner = runner
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=self.app, raise_app_exceptions=False), base_url="http://localhost"
        )

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(asyncio.wait_for(work, timeout=200))

    def get(self, path: str) -> httpx.Response:
        return self.run(self.http.get(path))

    def post(self, path: str, body: Any = None, *, content: bytes | None = None) -> httpx.Response:
        """`content`: a body that is not JSON as Python would write it."""
        text = json.dumps(body).encode() if content is None else content
        return self.run(self.http.post(path, content=text, headers={"content-type": "application/json"}))

    def chat(self, **fields: Any) -> dict[str, Any]:
        return self._good("/v1/chat/completions", {"messages": HELLO, "max_tokens": 12, "seed": 1} | fields)

    def complete(self, **fields: Any) -> dict[str, Any]:
        return self._good("/v1/completions", {"prompt": "abcabcabc", "max_tokens": 12, "seed": 1} | fields)

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a stream that ends well, without [DONE]."""
        response = self.post(path, body | {"stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, done = [event.removeprefix("data: ") for event in response.text.split("\n\n")[:-1]]
        assert done == "[DONE]"
        return [json.loads(chunk) for chunk in chunks]

    def chat_stream(self, **fields: Any) -> list[dict[str, Any]]:
        return self.stream("/v1/chat/completions", {"messages": HELLO, "max_tokens": 12, "seed": 1} | fields)

    def complete_stream(self, **fields: Any) -> list[dict[str, Any]]:
        return self.stream("/v1/completions", {"prompt": "abcabcabc", "max_tokens": 12, "seed": 1} | fields)

    def refused(self, path: str, body: Any = None, *, content: bytes | None = None) -> dict[str, Any]:
        """The error of a request that is refused, which says nothing of the server's insides."""
        response = self.post(path, body, content=content)
        assert 400 <= response.status_code < 500, (response.status_code, response.text)
        return check_error(response)

    def _good(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer


def check_error(response: httpx.Response) -> dict[str, Any]:
    assert response.json().keys() == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert len(error["message"]) <= 1000
    for leak in ("Traceback", "/srv", "site-packages", ".py", "0x"):
        assert leak not in response.text
    return error


def tiny_llm(path: Path, **options: Any) -> LLM:
    return LLM(str(write_model(path)), drafter="ngram:min_ngram=1", format="fp32", measure_cost=False, **options)


@contextmanager
def serving(llm: LLM, *, tracer: Tracer | None = None, **settings: Any) -> Iterator[Api]:
    with asyncio.Runner() as runner:
        bridge = Bridge(llm, model=MODEL)
        api = Api(bridge, Settings(**settings), runner, tracer=tracer)
        runner.run(bridge.start())
        try:
            yield api
        finally:
            runner.run(api.http.aclose())
            runner.run(bridge.close())
            llm.engine.check()
            assert not llm.engine.has_work


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """What the chunks say of one choice, put together."""
    parts = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(part["delta"].get("content", "") if "delta" in part else part["text"] for part in parts)
