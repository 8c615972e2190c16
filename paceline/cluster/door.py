"""The door: middleware in each of Ray's proxies, before a request is routed and after its answer.

    client ─▶ door ─▶ Ray's proxy ─▶ router ─▶ replica
              │ names the beginnings of the prompt in a header, since a router sees no body
              │ ends an answer whose replica is lost with an error that clients may retry
              │ gives Ray's own refusals the body of the API that was called

Ray's proxies load it by RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=paceline.cluster.door.middlewares. Imports no torch.
"""

from __future__ import annotations

import json

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.cluster.headers import PREFIX, REPLICA, Header, value_of, without
from paceline.cluster.prefixes import beginnings
from paceline.server.dialects import ANTHROPIC, OLLAMA, dialect_of
from paceline.server.problems import detail, error_response

IMPORT_PATH = "paceline.cluster.door.middlewares"
VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
MAX_READ = 1 << 20  # bytes of a body that are read for its beginnings; a longer body has none
RAYS_OWN = "/-/"  # begin of paths that Ray's proxies answer themselves
LOST = "the replica that answered was lost; send the request again"
REFUSALS = {  # status of Ray's own → message and code
    404: ("no application of this cluster has this path", "not_found"),
    408: ("the request took longer than this cluster allows; ask for fewer tokens", "timeout"),
    429: ("too many requests wait for a replica; try again later", "queue_full"),
    503: ("no replica takes requests now; try again later", "not_ready"),
}
STREAMS = ("text/event-stream", "application/x-ndjson")


def middlewares() -> list[Middleware]:
    """Name the middleware, as Ray's proxies ask for it."""
    return [Middleware(Door)]


class Door:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        named, found = without(scope["headers"], PREFIX), ""
        if scope["method"] == "POST":
            messages, body = await _read(receive)
            receive = _replay(messages, receive)
            found = "" if body is None else ",".join(beginnings(body))
        answer = Answer(scope, send)
        await self.app({**scope, "headers": [*named, (PREFIX, found.encode())]}, receive, answer.send)
        await answer.complete()


async def _read(receive: Receive) -> tuple[list[Message], bytes | None]:
    """Read the messages of a body, and the body if it is whole and not too long."""
    messages, size = [], 0
    while True:
        message = await receive()
        messages.append(message)
        size += len(message.get("body", b""))
        if message["type"] != "http.request" or size > MAX_READ:
            return messages, None
        if not message.get("more_body"):
            return messages, b"".join(each.get("body", b"") for each in messages)


def _replay(messages: list[Message], receive: Receive) -> Receive:
    """Make a `receive` that returns these messages first."""
    waiting = messages[::-1]

    async def replayed() -> Message:
        return waiting.pop() if waiting else await receive()

    return replayed


class Answer:
    """An answer on its way to the client."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._path, self._send = scope, scope["path"].removeprefix(scope.get("root_path") or ""), send
        self._refused: int | None = None  # status of a refusal by Ray
        self._started = self._ended = self._streams = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers: list[Header] = list(message.get("headers", ()))
            if self._is_rays(message["status"], headers):
                self._refused = message["status"]
                return
            self._started = True
            self._streams = (value_of(headers, b"content-type") or "").startswith(STREAMS)
            message = {**message, "headers": _once(headers, b"x-request-id")}
        elif self._refused is not None:
            return
        elif message["type"] == "http.response.body":
            self._ended = not message.get("more_body", False)
        await self._send(message)

    def _is_rays(self, status: int, headers: list[Header]) -> bool:
        return status >= 400 and value_of(headers, REPLICA) is None and not self._path.startswith(RAYS_OWN)

    async def complete(self) -> None:
        """Answer where nobody has, and end what nobody has ended."""
        if self._refused is not None:
            message, code = REFUSALS.get(self._refused, (LOST, "replica_lost"))
            await self._answer(self._refused if self._refused in REFUSALS else 503, message, code)
        elif not self._started:
            await self._answer(503, LOST, "replica_lost")
        elif not self._ended and self._streams:
            await self._send({"type": "http.response.body", "body": last_words(self._path), "more_body": False})

    async def _answer(self, status: int, message: str, code: str) -> None:
        retry = {"Retry-After": "1"} if status in (429, 503) else {}
        response = error_response(status, message, path=self._path, code=code, headers=retry)
        await self._send({"type": "http.response.start", "status": status, "headers": response.raw_headers})
        await self._send({"type": "http.response.body", "body": bytes(response.body), "more_body": False})


def last_words(path: str) -> bytes:
    """End a stream by the error, in the form of the API that was called."""
    error, dialect = detail(503, LOST, code="replica_lost"), dialect_of(path)
    body = json.dumps(dialect.error(error))
    if dialect is OLLAMA:
        return f"{body}\n".encode()
    if dialect is ANTHROPIC:
        return f"event: error\ndata: {body}\n\n".encode()
    if path.endswith("/responses"):
        event = {"type": "error", "code": error.code, "message": error.message, "param": None}
        return f"event: error\ndata: {json.dumps(event)}\n\n".encode()
    return f"data: {body}\n\ndata: [DONE]\n\n".encode()


def _once(headers: list[Header], name: bytes) -> list[Header]:
    """Keep the first header of this name: replica and proxy both name the request."""
    first = next((header for header in headers if header[0].lower() == name), None)
    return headers if first is None else [*without(headers, name), first]
