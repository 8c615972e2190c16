"""How answers travel: at once as JSON, or as server-sent events while they come.

A reply (see `Reply`) says what is sent; this module sees to it that every request is ended: when all is said, when the
client leaves, when something fails. Before the first byte a failure is a status, after it an event of the stream.

What a token costs here, it costs again and again, and between two tokens the model's weights have swept the caches: the
way of an event is short, and everything that came of a step leaves in one write.
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

from paceline.server.bridge import Bridge, Stream
from paceline.server.guards import STRAIGHT
from paceline.server.problems import ErrorBody, ErrorDetail, describe, failure
from paceline.types import Request, TokenEvent

T = TypeVar("T")

CLIENT_LEFT = 499  # nobody reads it; for the log
DONE = b"data: [DONE]\n\n"


class Reply(Protocol):
    """One request's answer in the making."""

    def add(self, event: TokenEvent) -> object:
        """For an answer that is sent at once."""

    def whole(self) -> BaseModel: ...

    def chunks(self, event: TokenEvent) -> Iterable[bytes]:
        """What an event adds to a stream, as `chunk` or `event` make it."""

    def end(self) -> Iterable[bytes]: ...

    def broken(self, error: ErrorDetail) -> Iterable[bytes]:
        """The last chunks of a stream that fails."""


def chunk_head(fields: Mapping[str, Any]) -> bytes:
    """How each chunk of a stream begins."""
    return b"data: " + to_json(fields)[:-1] + b","


def chunk(head: bytes, fields: Mapping[str, Any]) -> bytes:
    return b"%b%b\n\n" % (head, to_json(fields)[1:])


def event(kind: str, fields: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), to_json(fields))


def error_chunks(error: ErrorDetail) -> list[bytes]:
    return [b"data: %b\n\n" % ErrorBody(error=error).model_dump_json().encode(), DONE]


async def answer(
    http: HttpRequest, bridge: Bridge, requests: Sequence[Request], reply: Reply, *, stream: bool
) -> Response:
    async with AsyncExitStack() as leaving:
        events = await leaving.enter_async_context(bridge.submit(*requests))
        if not stream:
            return await while_there(http.receive, _whole(bridge, events, reply)) or Response(status_code=CLIENT_LEFT)
        # Until the first event, a failure can still be a status.
        first = await while_there(http.receive, anext(events))
        if first is None:
            return Response(status_code=CLIENT_LEFT)
        check(bridge, first)
        leaving.pop_all()  # from here on the stream is closed by whoever sends it
        return EventStream(bridge, first, events, reply)


def check(bridge: Bridge, event: TokenEvent) -> None:
    """Raise if this event ends its sequence, and not well."""
    if event.finish is not None and (problem := failure(event, dead=bridge.state == "dead")):
        raise problem


async def _whole(bridge: Bridge, events: Stream, reply: Reply) -> Response:
    async for event in events:
        check(bridge, event)
        reply.add(event)
    return Response(reply.whole().model_dump_json(exclude_unset=True), media_type="application/json")


async def while_there(receive: Receive, work: Awaitable[T]) -> T | None:
    """What comes of `work`; None if the client leaves before it is done, and then it is cancelled."""
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
    """Server-sent events, one send for each step of the engine. When the client leaves, everything ends at once."""

    media_type = "text/event-stream"

    def __init__(self, bridge: Bridge, first: TokenEvent, events: Stream, reply: Reply) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._bridge = bridge
        self._first = first
        self._events = events
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._events:
            with suppress(OSError):  # the client has gone, and the server knows it before `receive` says so
                await while_there(receive, self._send(send, scope[STRAIGHT]))

    async def _send(self, send: Send, straight: Send) -> None:
        """The guards have a say in how an answer begins; what follows goes straight to the server."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await self._send_events(straight)
            last = b"".join(self._reply.end())
        except OSError:
            raise
        except Exception as error:  # the HTTP boundary: the status is sent, so the stream says it
            last = b"".join(self._reply.broken(describe(error)[1]))
        await straight({"type": "http.response.body", "body": last, "more_body": True})
        await straight({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, send: Send) -> None:
        await self._send_step(send, (self._first,))
        async for event in self._events:
            await self._send_step(send, (event, *self._events.more()))

    async def _send_step(self, send: Send, events: Iterable[TokenEvent]) -> None:
        parts: list[bytes] = []
        try:
            for event in events:
                check(self._bridge, event)
                parts += self._reply.chunks(event)
        finally:
            if parts:  # also what came before a failure
                await send({"type": "http.response.body", "body": b"".join(parts), "more_body": True})
