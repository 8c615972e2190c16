"""The innermost guard: reads a body whole, checks it, and hands it on.

The content type must be JSON, which no web page can send to a foreign origin without asking first (CORS). Ollama takes
bodies of any type, and curl and litellm send them so. Its paths do here, too, but not from a browser.
"""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.server.dialects import dialect_of
from paceline.server.guards.check import BODILESS, PARSED, Refusal, has_body, values
from paceline.server.guards.json import check_json
from paceline.server.lane import LONG_INPUT, give_memory_back
from paceline.server.live import CurrentSettings
from paceline.server.settings import Settings

LONG_BODY = 1 << 16  # bytes; longer bodies are parsed on a thread, one at a time


class Bodies:
    """Reads bodies. A parsed one is `scope[PARSED]`, so that no route parses it again."""

    def __init__(self, app: ASGIApp, live: CurrentSettings) -> None:
        self.app, self.live = app, live
        self.held = 0  # bytes of the bodies of all open requests
        self.turn = asyncio.Lock()  # held by the long body that is read on

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in BODILESS:
            await self.app(scope, receive, send)
            return
        body = Body(self)
        try:
            await self._pass(body, scope, receive, send)
        finally:
            scope.pop(PARSED, None)
            self.held -= body.size
            if body.size >= LONG_BODY > self.held:
                LONG_INPUT.do_later(give_memory_back)

    async def _pass(self, body: Body, scope: Scope, receive: Receive, send: Send) -> None:
        complete = not has_body(scope)
        try:
            _check_kind(scope, self.live.settings)
            complete = await body.read(receive, self.live.settings)
            if complete and body.size:
                scope[PARSED] = await body.parse(self.live.settings)
        except Refusal as refusal:
            body.parts.clear()
            await refusal.answer(scope, receive, send, unread=not complete)
            return
        if complete:  # else the client left
            await self.app(_typed(scope), _replay(b"".join(body.parts), receive), send)


class Body:
    """A body on its way in."""

    def __init__(self, guard: Bodies) -> None:
        self.guard = guard
        self.parts: list[bytes] = []
        self.size = 0  # bytes, counted in `guard.held`

    async def read(self, receive: Receive, settings: Settings) -> bool:
        """Read to the end. False: the client left before it."""
        try:
            async with asyncio.timeout(settings.read_timeout):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        return False
                    self._add(message.get("body", b""), settings)
                    if not message.get("more_body"):
                        return True
                    if self.size >= LONG_BODY:
                        await self._wait_turn()
        except TimeoutError:
            text = f"the body did not arrive within {settings.read_timeout:g} s"
            raise Refusal(408, text, "body_timeout", {"Connection": "close"}) from None

    def _add(self, part: bytes, settings: Settings) -> None:
        self.parts.append(part)
        self.size += len(part)
        self.guard.held += len(part)
        if self.size > settings.max_body_bytes:
            _too_large(None, settings)
        if self.guard.held > max(settings.max_bodies_bytes, self.size):
            text = f"the bodies of all requests have more than {settings.max_bodies_bytes} bytes; try again later"
            raise Refusal(429, text, "too_many_bytes", {"Retry-After": "1"})

    async def _wait_turn(self) -> None:
        """Let one long body read on in each turn of the event loop; between them it serves others."""
        async with self.guard.turn:
            await asyncio.sleep(0)

    async def parse(self, settings: Settings) -> Any:
        """Parse the body: a short one at once, a long one on a thread, where it stalls no other request's stream."""

        def parsed() -> Any:
            self.parts[:] = [b"".join(self.parts)]
            return check_json(self.parts[0], max_depth=settings.max_json_depth, max_values=settings.max_json_values)

        return parsed() if self.size < LONG_BODY else await LONG_INPUT.do(parsed, size=self.size)


def _check_kind(scope: Scope, settings: Settings) -> None:
    encodings = [value.strip().lower() for value in values(scope, b"content-encoding")]
    if any(encoding not in (b"", b"identity") for encoding in encodings):
        raise Refusal(415, "compressed bodies are not taken; send it without Content-Encoding", "unsupported_encoding")
    lengths = [int(value) for value in values(scope, b"content-length") if value.isdigit()]
    if any(length > settings.max_body_bytes for length in lengths):
        _too_large(max(lengths), settings)
    if has_body(scope) and not _is_json(values(scope, b"content-type")) and not _may_be_untyped(scope):
        raise Refusal(415, "the body must be JSON: send `Content-Type: application/json`", "unsupported_content_type")


def _is_json(types: list[bytes]) -> bool:
    if len(types) != 1:
        return False
    kind, *options = [part.strip().lower() for part in types[0].split(b";")]
    charsets = [option.partition(b"=")[2].strip(b'"') for option in options if option.startswith(b"charset=")]
    return kind == b"application/json" and all(charset in (b"utf-8", b"utf8") for charset in charsets)


def _may_be_untyped(scope: Scope) -> bool:
    """True if no browser sent the body, and its API does not care for types. Browsers tell a POST's origin."""
    from_browser = any(values(scope, name) for name in (b"origin", b"sec-fetch-site"))
    return dialect_of(scope["path"]).untyped and not from_browser


def _typed(scope: Scope) -> Scope:
    """Name the content type that the body has been checked for, for the parser behind."""
    headers = [header for header in scope["headers"] if header[0] != b"content-type"]
    return {**scope, "headers": [*headers, (b"content-type", b"application/json")]}


def _too_large(size: int | None, settings: Settings) -> NoReturn:
    given = "the body" if size is None else f"the body has {size} bytes, which"
    raise Refusal(413, f"{given} is more than the {settings.max_body_bytes} bytes that are allowed", "body_too_large")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Make a `receive` that returns the body in one message, and then the client's next message: its departure."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed
