"""The door in Ray's proxies: what it adds to a request, and how an answer ends that nobody ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from paceline.cluster import door
from paceline.cluster.door import IMPORT_PATH, Door, middlewares
from paceline.cluster.headers import PREFIX, REPLICA, value_of
from paceline.cluster.prefixes import beginnings

Play = Callable[[Any, Any, Any], Awaitable[None]]
FROM_REPLICA = (REPLICA, b"r1")
BODY = json.dumps({"prompt": "p" * 300}).encode()


def start(status: int = 200, kind: bytes = b"text/event-stream", *more: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), *more]}


def body(text: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text, "more_body": more}


def ask(play: Play, path: str = "/v1/completions", *, content: bytes = BODY, **headers: str) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=Door(play))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.post(path, content=content, headers=headers)

    return asyncio.run(asyncio.wait_for(send(), 60))


async def lost_before(scope: Any, receive: Any, send: Any) -> None:
    """A replica that dies before it answers: Ray's proxy returns and says nothing."""


async def lost_in_stream(scope: Any, receive: Any, send: Any) -> None:
    await send(start(200, b"text/event-stream", FROM_REPLICA))
    await send(body(b"data: 1\n\n"))


def refusing(status: int) -> Play:
    async def play(scope: Any, receive: Any, send: Any) -> None:
        await send(start(status, b"text/plain"))
        await send(body(b"RayActorError: secrets", more=False))

    return play


def test_ray_finds_it() -> None:
    assert f"{door.__name__}.{middlewares.__name__}" == IMPORT_PATH
    [only] = middlewares()
    assert only.cls is Door  # type: ignore[comparison-overlap]


def test_the_router_is_told_the_beginnings_and_the_replica_gets_the_body() -> None:
    seen = {}

    async def play(scope: Any, receive: Any, send: Any) -> None:
        seen["prefix"] = value_of(scope["headers"], PREFIX)
        seen["body"] = (await receive())["body"]
        await send(start(200, b"application/json", FROM_REPLICA))
        await send(body(b"{}", more=False))

    assert ask(play, **{"x-paceline-prefix": "forged"}).json() == {}
    assert seen == {"prefix": ",".join(beginnings(BODY)), "body": BODY}


def test_a_long_body_goes_through_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "MAX_READ", 100)
    messages = [body(b"x" * 60) | {"type": "http.request"} for _ in range(4)] + [{"type": "http.disconnect"}]
    waiting, read, headers = messages[::-1], [], []

    async def receive() -> dict[str, Any]:
        return waiting.pop()

    async def play(scope: Any, receive: Any, send: Any) -> None:
        assert len(waiting) == 3, "two messages are more than the door reads"
        headers.append(value_of(scope["headers"], PREFIX))
        while (message := await receive())["type"] != "http.disconnect":
            read.append(message)

    async def nobody(message: Any) -> None: ...

    asyncio.run(Door(play)({"type": "http", "method": "POST", "path": "/", "headers": []}, receive, nobody))
    assert (read, headers) == (messages[:-1], [""])


def test_a_websocket_is_none_of_its_business() -> None:
    seen = []

    async def play(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)

    asyncio.run(Door(play)({"type": "websocket"}, None, None))  # type: ignore[arg-type]
    assert seen == [{"type": "websocket"}]


def test_a_request_whose_replica_is_lost_may_be_sent_again() -> None:
    answer = ask(lost_before)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "replica_lost"


@pytest.mark.parametrize(
    ("path", "end"),
    [
        ("/v1/completions", 'data: {"error": {"message": "the replica'),
        ("/v1/messages", 'event: error\ndata: {"type": "error", "error": {"type": "overloaded_error"'),
        ("/v1/responses", 'event: error\ndata: {"type": "error", "code": "replica_lost"'),
        ("/api/chat", '{"error": "the replica that answered was lost'),
    ],
)
def test_a_stream_whose_replica_is_lost_ends_with_an_error_of_its_api(path: str, end: str) -> None:
    text = ask(lost_in_stream, path).text
    assert text.startswith("data: 1\n\n" + end)
    assert text.endswith("data: [DONE]\n\n") == (path == "/v1/completions")


def test_a_stream_that_ended_is_left_alone() -> None:
    async def play(scope: Any, receive: Any, send: Any) -> None:
        await lost_in_stream(scope, receive, send)
        await send(body(b"data: [DONE]\n\n", more=False))

    assert ask(play).text == "data: 1\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize(
    ("status", "given", "code"),
    [(429, 429, "queue_full"), (503, 503, "not_ready"), (404, 404, "not_found"), (500, 503, "replica_lost")],
)
def test_rays_own_refusals_get_the_body_of_the_api(status: int, given: int, code: str) -> None:
    answer = ask(refusing(status))
    assert answer.status_code == given
    assert answer.json()["error"]["code"] == code
    assert "secrets" not in answer.text
    assert ("retry-after" in answer.headers) == (given in (429, 503))


def test_a_replicas_own_refusal_is_left_alone() -> None:
    async def play(scope: Any, receive: Any, send: Any) -> None:
        await send(start(400, b"application/json", FROM_REPLICA, (b"x-request-id", b"1"), (b"X-Request-ID", b"2")))
        await send(body(b'{"own": 1}', more=False))

    answer = ask(play)
    assert (answer.status_code, answer.json()) == (400, {"own": 1})
    assert answer.headers.get_list("x-request-id") == ["1"]


def test_rays_own_paths_are_left_alone() -> None:
    answer = ask(refusing(503), "/-/healthz")
    assert (answer.status_code, answer.text) == (503, "RayActorError: secrets")
