"""A server on a real socket in this process, around a tiny model, and a client of it.

When it has ended nothing may be left: no sequence, no page.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx

from paceline.llm import LLM
from paceline.server.bridge import Bridge
from paceline.server.process import ServerProcess, bind
from paceline.server.settings import Settings

PATIENCE = 200  # seconds: a guard against hanging, not a promise of speed


class Alive:
    """A running server, and a client of it."""

    def __init__(self, process: ServerProcess, port: int) -> None:
        self.process, self.port = process, port
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE)

    async def raw(self, data: bytes) -> bytes:
        """What is answered to these bytes, up to the end of the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            await writer.drain()
            answer = await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        return answer

    @property
    def connections(self) -> int:
        return len(self.process.server.server_state.connections)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def alive(llm: LLM, **options: Any) -> AsyncIterator[Alive]:
    settings = Settings(port=0, **options)
    listening = asyncio.Event()
    listener = bind(settings)
    with listener:
        bridge = Bridge(llm, model="tiny", max_waiting=settings.max_waiting)
        process = ServerProcess(bridge, settings, source=None, announce=listening.set)
        running = asyncio.create_task(process.run(listener))
        await listening.wait()
        server = Alive(process, listener.getsockname()[1])
        try:
            yield server
        finally:
            await server.http.aclose()
            process.stop()
            await running
            llm.engine.check()
            assert not llm.engine.has_work
            assert llm.engine._cache.pool.held == 0


def scenario(llm: LLM, play: Callable[[Alive], Awaitable[None]], **options: Any) -> None:
    async def whole() -> None:
        async with asyncio.timeout(PATIENCE), alive(llm, **options) as server:
            await play(server)

    asyncio.run(whole())
