"""How the events of a step travel: together, and as far as they are good."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.llm import LLM
from paceline.server.bridge import Bridge
from paceline.server.dialects import ErrorDetail
from paceline.server.guards.trace import DIRECT_SEND
from paceline.server.sse import DONE, EventStream, chunk, chunk_head, error_chunks, event
from paceline.server.stream import Stream
from paceline.types import Finish, Request, SamplingParams, TokenEvent
from tests.server.alive import Alive, scenario

BRIDGE = cast(Bridge, SimpleNamespace(state="ready"))
FIRST, SECOND, THIRD = (TokenEvent(request_id="r", sample=i, text=text) for i, text in enumerate("abc"))


class Echo:
    """Says the text of events."""

    def add(self, event: TokenEvent) -> None: ...

    def whole(self) -> Any: ...

    def chunks(self, event: TokenEvent) -> list[bytes]:
        return [event.text.encode()] if event.text else []

    def end(self) -> list[bytes]:
        return [DONE]

    def fail(self, error: ErrorDetail) -> list[bytes]:
        return error_chunks(error)


async def sent(events: Stream) -> list[bytes]:
    """What a client gets in each write, after the head."""
    messages: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    first = await anext(events)
    await EventStream(BRIDGE, first, events, Echo())({DIRECT_SEND: send, "type": "http"}, receive, send)
    assert messages.pop(0)["type"] == "http.response.start"
    assert [message["more_body"] for message in messages] == [True] * (len(messages) - 1) + [False]
    return [message["body"] for message in messages]


def stream() -> Stream:
    request = Request(id="r", prompt=(1,), sampling=SamplingParams(n=3))
    return Stream([request], lambda ids: None)


@pytest.mark.parametrize("ends", [Finish.STOP, Finish.ABORT])
def test_a_step_is_one_write(ends: Finish) -> None:
    async def scenario() -> list[bytes]:
        events = stream()
        events.take(FIRST)
        events.take(SECOND)
        events.take(THIRD)
        for sample, finish in enumerate((Finish.STOP, Finish.STOP, ends)):
            events.take(TokenEvent(request_id="r", sample=sample, finish=finish))
        return await sent(events)

    first, rest, last = asyncio.run(scenario())
    assert (first, rest) == (b"a", b"bc")  # also before a failure
    if ends is Finish.STOP:
        assert last == DONE
    else:
        error, done, _ = last.decode().split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "aborted"
        assert done == "data: [DONE]"


def test_chunks_are_json_behind_their_head() -> None:
    head = chunk_head({"id": "x", "created": 3})
    text = chunk(head, {"choices": [{"text": 'ü "\n\u2028'}], "usage": None}).decode()
    assert text.startswith("data: ")
    assert text.endswith("\n\n")
    assert text.count("\n") == 2
    body = {"id": "x", "created": 3, "choices": [{"text": 'ü "\n\u2028'}], "usage": None}
    assert json.loads(text.removeprefix("data: ")) == body
    assert event("a.b", {"n": 1}) == b'event: a.b\ndata: {"n":1}\n\n'


BODY = {"prompt": "abcabcabc", "max_tokens": 12, "temperature": 0}


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_stream_over_a_socket(llm: LLM, version: str) -> None:
    """Chunks of HTTP/1.1, where they are framed without h11, come together to what they were; 1.0 knows no chunks."""

    async def play(server: Alive) -> None:
        whole = (await server.http.post("/v1/completions", json=BODY)).json()["choices"][0]["text"]
        body = json.dumps(BODY | {"stream": True})
        head = f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}"
        top, _, text = (await server.raw(request.encode())).partition(b"\r\n\r\n")
        assert (b"transfer-encoding: chunked" in top.lower()) == (version == "1.1")
        said = "".join(unframed(text) if version == "1.1" else [text.decode()])
        *chunks, done = said.split("\n\n")[:-1]
        assert done == "data: [DONE]"
        assert len(chunks) > 1
        assert "".join(json.loads(c.removeprefix("data: "))["choices"][0]["text"] for c in chunks) == whole

    scenario(llm, play)


def unframed(body: bytes) -> Iterator[str]:
    while True:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            assert rest == b"\r\n"
            return
        yield rest[:length].decode()
        assert rest[length : length + 2] == b"\r\n"
        body = rest[length + 2 :]
