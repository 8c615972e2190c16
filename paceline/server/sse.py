"""Send answers: as one JSON body, or while they grow as server-sent events or lines of JSON.

An answer (see `HttpAnswer` and the package `answers`) makes the content. This module ends every request: when the
answer is complete, the client leaves, or something fails. A failure before the first byte is an HTTP status; a later
one is an event of the stream.

The code for an event is short on purpose: it runs once a token, with cold CPU caches, because the model's weights pass
through them between two tokens. For the same reason all events that have arrived are sent in one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, Protocol, TypeVar

from fastapi import Request as HttpRequest
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.server.bridge import Bridge
from paceline.server.dialects import ErrorBody, ErrorDetail
from paceline.server.guards.trace import DIRECT_SEND
from paceline.server.problems import describe, failure
from paceline.server.stream import Stream
from paceline.types import Request, TokenEvent

T = TypeVar("T")

CLIENT_LEFT = 499  # status for the log alone: the client is gone
DONE = b"data: [DONE]\n\n"
PACING = "paceline.pacing"  # key in a scope: the `Pacing` of the answer, if chunks are dear on their way to the client
EVENTS, LINES = "text/event-stream", "application/x-ndjson"  # content types of streams


class HttpAnswer(Protocol):
    """One HTTP request's answer in the making: sent as a whole (`add`, `whole`) or as a stream (the others)."""

    def add(self, event: TokenEvent) -> None: ...

    def whole(self) -> BaseModel: ...

    def chunks(self, event: TokenEvent) -> Iterable[bytes]:
        """Make the chunks that an event adds to a stream, each by `chunk` or `event`."""

    def end(self) -> Iterable[bytes]: ...

    def fail(self, error: ErrorDetail) -> Iterable[bytes]:
        """Make the last chunks of a stream that fails."""


class Pacing(Protocol):
    """The rests between the chunks of one stream."""

    async def rest(self, events: Stream) -> None:
        """Wait after a chunk, at most until all events are there."""


# One event of a stream.


def chunk_head(fields: Mapping[str, Any]) -> bytes:
    """Write the fields that every chunk of a stream begins with."""
    return b"data: " + to_json(fields)[:-1] + b","


def chunk(head: bytes, fields: Mapping[str, Any]) -> bytes:
    return b"%b%b\n\n" % (head, to_json(fields)[1:])


def event(kind: str, fields: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), to_json(fields))


def line(fields: Mapping[str, Any]) -> bytes:
    return to_json(fields) + b"\n"


def error_chunks(error: ErrorDetail) -> list[bytes]:
    return [b"data: %b\n\n" % ErrorBody(error=error).model_dump_json().encode(), DONE]


async def send(
    answer: HttpAnswer,
    http: HttpRequest,
    bridge: Bridge,
    requests: Sequence[Request],
    *,
    stream: bool,
    content_type: str = EVENTS,
) -> Response:
    """Submit requests to the engine and send their answer. `content_type`: of a stream, EVENTS or LINES."""
    async with AsyncExitStack() as leaving:
        assigned = http.app.state.canary.assign(http, requests)
        events = await leaving.enter_async_context(bridge.submit(*assigned))
        if not stream:
            return await while_there(http.receive, _whole(bridge, events, answer)) or Response(status_code=CLIENT_LEFT)
        # Until the first event, a failure can still be a status.
        first = await while_there(http.receive, anext(events))
        if first is None:
            return Response(status_code=CLIENT_LEFT)
        check(bridge, first)
        leaving.pop_all()  # from here on `EventStream` closes the events
        return EventStream(bridge, first, events, answer, content_type=content_type)


def check(bridge: Bridge, event: TokenEvent) -> None:
    """Raise if this event ends its sequence by an abort, a deadline or an error."""
    if event.finish is not None and (problem := failure(event, dead=bridge.state == "dead")):
        raise problem


async def _whole(bridge: Bridge, events: Stream, answer: HttpAnswer) -> Response:
    async for event in events:
        check(bridge, event)
        answer.add(event)
    return Response(answer.whole().model_dump_json(exclude_unset=True), media_type="application/json")


async def while_there(receive: Receive, work: Awaitable[T]) -> T | None:
    """Await `work`. If the client leaves first, cancel it and return None."""
    working = asyncio.ensure_future(work)
    watching = asyncio.create_task(_departure(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A stream, with one send for all events that have arrived. A client that leaves aborts its requests."""

    def __init__(
        self, bridge: Bridge, first: TokenEvent, events: Stream, answer: HttpAnswer, *, content_type: str = EVENTS
    ) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"}, media_type=content_type)
        del self.headers["content-length"]
        self._bridge = bridge
        self._first = first
        self._events = events
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._events:
            with suppress(OSError):  # a write failed: the client left, and `receive` has not reported it yet
                await while_there(receive, self._send(send, scope[DIRECT_SEND], scope.get(PACING)))

    async def _send(self, send: Send, direct: Send, pacing: Pacing | None) -> None:
        """Start the response through the guards; send its body past them."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await self._send_events(direct, pacing)
            last = b"".join(self._answer.end())
        except OSError:
            raise
        except Exception as error:  # the HTTP boundary: the status is sent, so the stream says it
            last = b"".join(self._answer.fail(describe(error)[1]))
        await direct({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_events(self, send: Send, pacing: Pacing | None) -> None:
        await self._send_step(send, (self._first,))
        if pacing is not None:
            await pacing.rest(self._events)
        async for event in self._events:
            await self._send_step(send, (event, *self._events.more()))
            if pacing is not None:
                await pacing.rest(self._events)

    async def _send_step(self, send: Send, events: Iterable[TokenEvent]) -> None:
        parts: list[bytes] = []
        try:
            for event in events:
                check(self._bridge, event)
                parts += self._answer.chunks(event)
        finally:
            if parts:  # chunks made before a failure are sent, too
                await send({"type": "http.response.body", "body": b"".join(parts), "more_body": True})
