"""An engine of a tiny model behind asyncio, and what tests ask of it.

Whoever leaves `bridged` has checked that nothing stayed behind: no thread, no request, no page, no lane.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from paceline.server.bridge import Bridge
from paceline.server.stream import Stream
from paceline.types import Request, SamplingParams, TokenEvent
from tests.rig import Rig, build
from tests.rig_drafters import RIGS
from tests.runs import Key, Told, prompt
from tests.tiny_models import tiny_tokenizer

LONG = SamplingParams(temperature=0, max_tokens=120)


def aio(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, timeout=200))


def rig_of(**options: Any) -> Rig:
    return build("toy", {"ngram": RIGS["ngram"]["ngram"]}, tokenizer=tiny_tokenizer(), **options)


def a_request(name: str = "r", sampling: SamplingParams = LONG) -> Request:
    return Request(id=name, prompt=prompt(9, seed=1), sampling=sampling)


@asynccontextmanager
async def bridged(rig: Rig, **options: Any) -> AsyncIterator[Bridge]:
    llm: Any = SimpleNamespace(engine=rig.engine, tokenizer=tiny_tokenizer())
    bridge = Bridge(llm, model="toy", **options)
    await bridge.start()
    try:
        yield bridge
    finally:
        await bridge.close()
        assert not bridge._thread.is_alive()
        assert bridge.open_requests == bridge._sequences == 0
        rig.engine.check()
        assert rig.cache.pool.held == 0
        assert rig.lanes.free == len(rig.lanes.lengths)


async def read(stream: Stream) -> dict[Key, Told]:
    told = {(id, i): Told() for id, request in stream.requests.items() for i in range(request.sampling.n)}
    async for event in stream:
        told[event.request_id, event.sample].add(event)
    return told


class Gate:
    """Holds the engine before its steps."""

    def __init__(self, rig: Rig) -> None:
        self.opened = threading.Event()
        step = rig.engine.step

        def gated() -> list[TokenEvent]:
            assert self.opened.wait(timeout=200)
            return step()

        rig.engine.step = gated
