"""The text of a call while it is written, for threads and for event loops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue

from paceline.program.call import Call


@dataclass(frozen=True, slots=True)
class Pieces:
    """The text of a call, piece by piece as it comes."""

    find: Callable[[], Call]  # waits until the call is made

    def __iter__(self) -> Iterator[str]:
        call, news, read = self.find(), SimpleQueue[None](), 0
        call.watch(lambda: news.put(None))
        while True:
            news.get()
            ended = call.ended  # before the pieces: none comes after the end
            while read < len(call.pieces):
                read += 1
                yield call.pieces[read - 1]
            if ended:
                call.wait()
                return

    async def __aiter__(self) -> AsyncIterator[str]:
        news, read = asyncio.Event(), 0
        call = await asyncio.to_thread(self.find)
        call.watch(telling(asyncio.get_running_loop(), news.set))
        while True:
            await news.wait()
            news.clear()
            ended = call.ended
            while read < len(call.pieces):
                read += 1
                yield call.pieces[read - 1]
            if ended:
                call.wait()
                return


def telling(loop: asyncio.AbstractEventLoop, then: Callable[[], None]) -> Callable[[], None]:
    """Make a function for other threads that has an event loop call `then`; nothing, once the loop is closed."""

    def tell() -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(then)

    return tell
