"""The drafters of a running server: which are loaded, and how others come and go while requests run.

Weights are read on a thread of their own; the engine's thread only takes a drafter in, or lets it go, between two
steps. What was loaded is kept in the state folder, so that a restart and other servers of the deployment have it, too.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

from paceline.engine.hot import NONE, HotDrafters, Loaded
from paceline.errors import InvalidRequest, PacelineError, StorageError, UnknownOption
from paceline.server import logs
from paceline.server.bridge import Bridge
from paceline.server.canary.store import State, Store
from paceline.server.lane import give_memory_back


class ServedDrafters:
    def __init__(self, bridge: Bridge, store: Store) -> None:
        self.store = store
        self.words: dict[str, str] = {}  # drafters that were loaded while the server ran
        self.changing = asyncio.Lock()  # held while drafters, default or canary change
        self._bridge = bridge
        self._failed: dict[str, str] = {}  # words that other servers loaded and this one cannot, with the error

    @cached_property
    def _hot(self) -> HotDrafters:
        return HotDrafters(self._bridge.llm.parts)

    @property
    def default(self) -> str:
        return self._bridge.llm.engine.default_drafter or NONE

    def is_loaded(self, name: str) -> bool:
        return name in self._bridge.stats().drafters

    def listed(self) -> list[dict[str, Any]]:
        """Say of each drafter who it is, how it drafts, and why it is out of use if it is."""
        recipes, default = self._bridge.llm.parts.drafters, self.default
        return [
            {
                "name": name,
                "words": self.words.get(name),
                "how": recipes[name].how if name in recipes else "drafts what requests predict",
                "default": name == default,
                "hot": name in self.words,
                "out": out,
            }
            for name, out in self._bridge.stats().drafters.items()
        ]

    # The caller holds `changing`.

    async def load(self, words: str, name: str | None = None) -> str:
        """Load a drafter and return its name. Nothing is kept."""
        loaded = await asyncio.to_thread(self._hot.load, words, name=name)
        made = loaded.recipe
        await self._bridge.on_engine(lambda engine: self._join(loaded))
        recipes: Any = self._bridge.llm.parts.drafters
        recipes[made.name] = made
        self.words[made.name] = words
        logs.say("drafter loaded", drafter=made.name, words=words, how=made.how)
        return made.name

    async def unload(self, name: str) -> None:
        """Unload a drafter. Its memory comes back before this returns."""
        await self._bridge.on_engine(lambda engine: self._leave(name))
        recipes: Any = self._bridge.llm.parts.drafters
        recipes.pop(name, None)
        self.words.pop(name, None)
        await asyncio.to_thread(_collect)
        logs.say("drafter unloaded", drafter=name)

    async def set_default(self, name: str) -> None:
        """Choose the drafter of requests that name none; NONE: they decode plainly."""
        if name != NONE and not self.is_loaded(name):
            raise UnknownOption("drafter", name, [*self._bridge.stats().drafters, NONE], param="drafter")

        def choose(engine: Any) -> None:
            guard = engine.drafters.get(name)  # None: nobody, or a drafter that only a device has
            if guard is not None and guard.needs_prediction:
                raise InvalidRequest(f"the drafter {name} needs predictions, and is no default", param="drafter")
            engine.default_drafter = None if name == NONE else name

        if name != self.default:
            await self._bridge.on_engine(choose)
            self._refresh(await self._bridge.on_engine(lambda engine: engine.snapshot()))
            logs.say("default drafter", drafter=name)

    async def keep(self, edit: Callable[[State], None]) -> State:
        return await asyncio.to_thread(self.store.change, edit)

    async def follow(self, state: State) -> None:
        """Load, unload and choose what the state says. What fails is told in the log, and not tried again."""
        for name, words in state.drafters.items():
            if not self.is_loaded(name) and self._failed.get(name) != words:
                await self._try(self.load(words, name), f"{name}={words}") or self._failed.update({name: words})
        if state.default and (state.default == NONE or self.is_loaded(state.default)):
            await self._try(self.set_default(state.default), state.default)
        for name in [name for name in self.words if name not in state.drafters]:
            await self._try(self.unload(name), name)

    async def _try(self, work: Any, what: str) -> bool:
        try:
            await work
        except PacelineError as error:
            logs.say("state not followed", level=logging.WARNING, drafter=what, reason=str(error))
            return False
        return True

    def _join(self, loaded: Loaded) -> None:
        self._hot.join(loaded)
        self._refresh(self._bridge.llm.engine.snapshot())

    def _leave(self, name: str) -> None:
        self._hot.unload(name)
        self._refresh(self._bridge.llm.engine.snapshot())

    def _refresh(self, snapshot: Any) -> None:
        """Show drafters as they are now, although no step was made."""
        self._bridge.show(snapshot)

    # For routes.

    async def add(self, words: str, name: str | None) -> str:
        """Load a drafter and keep it in the state; if that fails, it is not loaded."""
        async with self.changing:
            found = await self.load(words, name)
            try:
                await self.keep(lambda state: state.drafters.update({found: words}))
            except StorageError:
                await self.unload(found)
                raise
            return found

    async def remove(self, name: str) -> None:
        async with self.changing:
            self._hot.check_unload(name)
            await self.keep(partial(_forget, name=name))
            await self.unload(name)

    async def choose(self, name: str) -> None:
        async with self.changing:
            before = self.default
            await self.set_default(name)
            try:
                await self.keep(lambda state: setattr(state, "default", name))
            except StorageError:
                await self.set_default(before)
                raise


def _forget(state: State, *, name: str) -> None:
    state.drafters.pop(name, None)


def _collect() -> None:
    gc.collect()
    give_memory_back()
