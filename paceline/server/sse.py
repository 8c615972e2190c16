"""How answers travel: at once as JSON, or as server-sent events while they come.

A reply (see `Reply`) says what is sent; this module sees to it that every request is ended: when all is said, when the
client leaves, when something fails. Before the first byte a failure is a status, after it an event of the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Protocol, TypeVar

from fastapi import Request as HttpRequest
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.server.bridge import Bridge, Stream
from paceline.server.problems import ErrorBody, ErrorDetail, describe, failure
from paceline.types import Request, TokenEvent

T = TypeVar("T")

CLIENT_LEFT = 499  # nobody reads it; for the log
DONE = "data: [DONE]\n\n"

Events = AsyncGenerator[tuple[int, TokenEvent], None]  # (which prompt, what came of it)


class Reply(Protocol):
    """One request's answer in the making."""

    def add(self, prompt: int, event: TokenEvent) -> object:
        """For an answer that is sent at once."""

    def whole(self) -> BaseModel: ...

    def begin(self) -> Iterable[str]:
        """Chunks of a stream before anything was said, as `data` or `event` make them."""

    def chunks(self, prompt: int, event: TokenEvent) -> Iterable[str]: ...

    def end(self) -> Iterable[str]: ...

    def broken(self, error: ErrorDetail) -> Iterable[str]:
        """The last chunks of a stream that fails."""


def data(body: BaseModel) -> str:
    """Fields that were not set are left out; those that were set to nothing are null."""
    return f"data: {body.model_dump_json(exclude_unset=True)}\n\n"


def event(kind: str, text: str) -> str:
    return f"event: {kind}\ndata: {text}\n\n"


def error_chunks(error: ErrorDetail) -> list[str]:
    return [f"data: {ErrorBody(error=error).model_dump_json()}\n\n", DONE]


async def answer(
    http: HttpRequest, bridge: Bridge, requests: Sequence[Request], reply: Reply, *, stream: bool
) -> Response:
    events = follow(bridge, requests)
    if not stream:
        return await while_there(http.receive, _whole(events, reply)) or Response(status_code=CLIENT_LEFT)
    # Until the first event, a failure can still be a status.
    first = await while_there(http.receive, anext(events))
    if first is None:
        return Response(status_code=CLIENT_LEFT)
    return EventStream(first, events, reply)


async def follow(bridge: Bridge, requests: Sequence[Request]) -> Events:
    """The events of several requests as they come. All of them are ended when this is closed."""
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(bridge.submit(request)) for request in requests]
        async with aclosing(merge(streams)) as merged:
            async for prompt, said in merged:
                if problem := failure(said, dead=bridge.state == "dead"):
                    raise problem
                yield prompt, said


async def merge(streams: Sequence[Stream]) -> Events:
    if len(streams) == 1:
        async for said in streams[0]:
            yield 0, said
        return
    inbox: asyncio.Queue[tuple[int, TokenEvent | Exception | None]] = asyncio.Queue()
    readers = [asyncio.create_task(_read(i, stream, inbox)) for i, stream in enumerate(streams)]
    try:
        left = len(readers)
        while left:
            i, item = await inbox.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield i, item
    finally:
        await _end(readers)


async def _read(i: int, stream: Stream, inbox: asyncio.Queue[tuple[int, TokenEvent | Exception | None]]) -> None:
    try:
        async for said in stream:
            inbox.put_nowait((i, said))
        inbox.put_nowait((i, None))
    except Exception as error:  # raised again where the inbox is read
        inbox.put_nowait((i, error))


async def _whole(events: Events, reply: Reply) -> Response:
    async with aclosing(events):
        async for prompt, said in events:
            reply.add(prompt, said)
    return Response(reply.whole().model_dump_json(exclude_unset=True), media_type="application/json")


async def while_there(receive: Receive, work: Awaitable[T]) -> T | None:
    """What comes of `work`; None if the client leaves before it is done, and then it is cancelled."""
    working = asyncio.ensure_future(work)
    watching = asyncio.create_task(_departure(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await _end([working, watching])


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(tasks: Iterable[asyncio.Future[T]] | Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Server-sent events, one send for each event of the engine. When the client leaves, everything ends at once."""

    media_type = "text/event-stream"

    def __init__(self, first: tuple[int, TokenEvent], events: Events, reply: Reply) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(OSError):  # the client has gone, and the server knows it before `receive` says so
                await while_there(receive, self._send(send))
        finally:
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._texts()) as texts:
            async for text in texts:
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _texts(self) -> AsyncGenerator[str, None]:
        reply = self._reply
        try:
            yield "".join([*reply.begin(), *reply.chunks(*self._first)])
            async for prompt, said in self._events:
                if text := "".join(reply.chunks(prompt, said)):
                    yield text
            yield "".join(reply.end())
        except Exception as error:  # the HTTP boundary: the status is sent, so the stream says it
            yield "".join(reply.broken(describe(error)[1]))
