"""The guard of rates: requests of one caller within a minute, and at once."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.server.guards.check import BODILESS, Refusal, has_body
from paceline.server.live import CurrentSettings
from paceline.server.problems import ADMIN_PREFIX

MINUTE = 60.0  # seconds
MAX_CALLERS = 4096  # callers in memory; beyond that, those without recent requests are forgotten


@dataclass(slots=True)
class Caller:
    """Recent requests of one key, or of one address."""

    running: int = 0
    began: deque[float] = field(default_factory=deque)  # times within the last minute


class Rates:
    """Limits requests by caller, except those of the admin and of methods without a body, such as GET."""

    def __init__(self, app: ASGIApp, live: CurrentSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self.app, self.live, self.clock = app, live, clock
        self.callers: dict[str, Caller] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in BODILESS or scope["path"].startswith(ADMIN_PREFIX):
            await self.app(scope, receive, send)
            return
        caller = self._caller(scope["caller"])
        try:
            self._check(caller)
        except Refusal as refusal:
            await refusal.answer(scope, receive, send, unread=has_body(scope))
            return
        caller.running += 1
        try:
            await self.app(scope, receive, send)
        finally:
            caller.running -= 1

    def _check(self, caller: Caller) -> None:
        now, settings = self.clock(), self.live.settings
        per_minute, at_once = settings.requests_per_minute_per_key, settings.max_concurrency_per_key
        _forget(caller, now)
        if at_once and caller.running >= at_once:
            _too_many(f"{caller.running} of your requests are running, {at_once} may", 1)
        if per_minute and len(caller.began) >= per_minute:
            wait = caller.began[-per_minute] + MINUTE - now
            _too_many(f"{per_minute} requests a minute are allowed", max(1, math.ceil(wait)))
        if per_minute:
            caller.began.append(now)

    def _caller(self, name: str) -> Caller:
        if name not in self.callers and len(self.callers) >= MAX_CALLERS:
            now = self.clock()
            for caller in self.callers.values():
                _forget(caller, now)
            self.callers = {name: caller for name, caller in self.callers.items() if caller.running or caller.began}
        return self.callers.setdefault(name, Caller())


def _forget(caller: Caller, now: float) -> None:
    while caller.began and caller.began[0] <= now - MINUTE:
        caller.began.popleft()


def _too_many(message: str, seconds: int) -> NoReturn:
    text = f"{message}; try again in {seconds} s"
    raise Refusal(429, text, "rate_limit_exceeded", {"Retry-After": str(seconds)})
