"""A server on a thread of its own, and its model for the thread that started it.

    this thread                        the server's thread
    Speaker.stream ── submit ───────▶ │ Bridge, routes, clients │
                   ◀── TokenEvents ── │                         │

Both ask the same engine, so a conversation on the terminal and requests of clients share its batch.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from paceline.errors import EngineDead
from paceline.llm import LLM
from paceline.server.bridge import Bridge
from paceline.server.process import ServerProcess
from paceline.server.settings import Settings
from paceline.server.stream import Stream
from paceline.text.tokenizer import Tokenizer
from paceline.types import Finish, Request, SamplingParams, Speculation, TokenEvent

T = TypeVar("T")


class ServedModel:
    """The model of a server in this process, for one thread beside the event loop."""

    def __init__(self, bridge: Bridge, loop: asyncio.AbstractEventLoop) -> None:
        self._bridge, self._loop = bridge, loop
        self._ids = (f"terminal-{number}" for number in itertools.count())

    @property
    def tokenizer(self) -> Tokenizer:
        return self._bridge.llm.tokenizer

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        return self._bridge.llm.encode_chat(messages)

    def stream(
        self, prompt: Sequence[int], sampling: SamplingParams, *, speculation: Speculation
    ) -> Iterator[TokenEvent]:
        """Yield events as they come. Closing the iterator early aborts the request. Raises as `LLM.stream` does."""
        tokens, structured = tuple(prompt), sampling.grammar is not None
        asked = self._bridge.llm.resolved(speculation, [tokens], structured=structured)
        kind = self._bridge.llm.drafted_kind(tokens, asked, structured=structured)
        request = Request(id=next(self._ids), prompt=tokens, sampling=sampling, speculation=asked, kind=kind)
        return self._events(self._await(self._submit(request)))

    def _events(self, stream: Stream) -> Iterator[TokenEvent]:
        try:
            while (event := self._await(_next(stream))) is not None:
                if event.finish is Finish.ERROR:
                    raise EngineDead(f"the answer could not be completed: {event.error}")
                yield event
        finally:
            self._await(stream.aclose())

    async def _submit(self, request: Request) -> Stream:
        return self._bridge.submit(request)

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _next(stream: Stream) -> TokenEvent | None:
    return await anext(stream, None)


@contextmanager
def serving(llm: LLM, settings: Settings, *, listener: socket.socket, name: str) -> Iterator[ServedModel]:
    """Serve while the block runs. At its end, running requests are aborted and the thread has ended."""
    bridge = Bridge(llm, model=name, max_waiting=settings.max_waiting, stream_interval=settings.stream_interval)
    listening = threading.Event()
    process = ServerProcess(bridge, settings, source=None, announce=listening.set)
    loop = asyncio.new_event_loop()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="server") as threads:
        done = threads.submit(loop.run_until_complete, process.run(listener, signals=False))
        done.add_done_callback(lambda _: listening.set())  # a server that fails to start is not waited for
        listening.wait()
        try:
            yield ServedModel(bridge, loop)
        finally:
            if not done.done():
                loop.call_soon_threadsafe(process.stop)
            done.result()
            loop.close()
