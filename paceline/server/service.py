"""A model with its app, from loading to closing: what every way to serve it has in common.

Who listens is not known here: a process of its own (`process.py`), or a replica of a cluster. A service belongs to one
event loop.
"""

from __future__ import annotations

import asyncio
import gc

from paceline.server.app import create_app
from paceline.server.bridge import Bridge
from paceline.server.live import CurrentSettings
from paceline.server.loading import Load
from paceline.server.settings import Settings
from paceline.server.traces import Tracer


class Service:
    """A bridge and its app. `load` is called by `start`, unless the bridge has its model already."""

    def __init__(self, bridge: Bridge, settings: Settings, *, load: Load | None = None) -> None:
        self.bridge, self.settings = bridge, settings
        self._load = load
        endpoint = settings.otlp_endpoint
        self._tracer = None if endpoint is None else Tracer(endpoint, model=bridge.model)
        self.app = create_app(bridge, settings, tracer=self._tracer)
        self.live: CurrentSettings = self.app.state.live
        self.live.listeners.append(self._apply)

    async def start(self) -> None:
        """Load the model and start to serve."""
        if self._load is not None:
            self.bridge.adopt(await self.bridge.loading.run(self._load))
        gc.collect()
        gc.freeze()  # the model's objects stay: looking through them takes 0.1 s whenever a long body is parsed
        await self.bridge.start()
        await self.app.state.canary.restore(self.settings.canary)

    async def close(self) -> None:
        """Abort what still runs, and send the last traces."""
        await self.bridge.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    def _apply(self, settings: Settings) -> None:
        self.bridge.max_waiting = settings.max_waiting
        self.bridge.stream_interval = settings.stream_interval
