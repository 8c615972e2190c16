"""Events of requests on their way from the engine's thread to one reader on the event loop.

A stream keeps its events until they are read: a slow reader delays no other, and its stream holds no more tokens than
its request's max_tokens.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Self

from paceline.errors import PacelineError
from paceline.server import logs
from paceline.types import Request, TokenEvent


class Stream:
    """The events of some requests, for one reader. A reader that stops before the end aborts the requests: by `aclose`,
    by leaving `async with`, or by being cancelled while waiting."""

    def __init__(self, requests: Sequence[Request], abandon: Callable[[Iterable[str]], None]) -> None:
        self.requests = {request.id: request for request in requests}
        self.open = {request.id: set(range(request.sampling.n)) for request in requests}  # samples that have not ended
        self.record = logs.current.get()
        if self.record is not None:
            self.record.running += sum(map(len, self.open.values()))
        self._abandon = abandon
        self._events: deque[TokenEvent] = deque()
        self._arrival: asyncio.Future[None] | None = None  # done when there is an event to read
        self._ended: asyncio.Event | None = None  # set when no sample is open, for one who rests
        self._failure: PacelineError | None = None
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenEvent:
        while not self._events:
            if self._failure is not None:
                raise self._failure
            if self._closed or not self.open:
                raise StopAsyncIteration
            self._arrival = asyncio.get_running_loop().create_future()
            try:
                await self._arrival
            except asyncio.CancelledError:
                self._close()
                raise
        return self._events.popleft()

    def more(self) -> Iterator[TokenEvent]:
        """Yield the events that have arrived, without waiting for others."""
        while self._events:
            yield self._events.popleft()

    async def rest(self, seconds: float) -> None:
        """Wait for some time, or until all requests have ended."""
        if self.open:
            self._ended = asyncio.Event()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._ended.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._close()

    async def aclose(self) -> None:
        self._close()

    def take(self, event: TokenEvent) -> None:
        """Take an event from the bridge. Once the reader has left, the event is counted and dropped."""
        if event.finish is not None:
            self._end(event.request_id, {event.sample})
            if self.record is not None and event.stats is not None:
                self.record.count(self.requests[event.request_id], event)
        if not self._closed:
            self._events.append(event)
            self._wake()

    def fail(self, request_id: str, error: PacelineError) -> None:
        """Take a refusal from the bridge: the engine found a reason that `submit` could not know."""
        samples = set(self.open[request_id])
        self._end(request_id, samples)
        if self.record is not None:
            self.record.leave(len(samples))
        self._failure = error
        self._wake()

    def _end(self, request_id: str, samples: set[int]) -> None:
        self.open[request_id] -= samples
        if not self.open[request_id]:
            del self.open[request_id]
        if not self.open and self._ended is not None:
            self._ended.set()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._events.clear()
            self._wake()
            self._abandon(self.open)
