"""The engine on a thread of its own: other threads give orders, and it hands out events.

    other threads                       engine thread
    order ────────── orders ──▶ │ take orders, step, │
    deliver ◀─ events of a step ─ │ step, … or sleep   │

The engine is single-threaded by contract: only this thread changes it. Other threads only validate requests, compile
grammars and read constants. Orders wake the thread, so an idle engine costs nothing and starts at once.

Steps that follow each other within `interval` share a delivery; an event that ends a sequence never waits. Whatever
happens to the engine or the thread, `deliver` hears of it: the broad `except` in `_run` ensures this.

While the thread is idle it checks the KV cache, once in each idle period. An inconsistent cache could change the
target's output, so the engine is then dead, as after a failed step. Each second it asks whether the processes of a
split model still answer.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from paceline.engine.engine import Engine
from paceline.errors import RankLost
from paceline.types import TokenEvent

logger = logging.getLogger(__name__)

IDLE_CHECK_SECONDS = 5.0  # idle time before the KV cache is checked; a check takes 0.5 µs a page, 0.14 s for 300,000
WATCH_SECONDS = 1.0  # idle time between two questions to the processes of a split model

Order = Callable[[Engine], None]
Deliver = Callable[[list[TokenEvent], str | None], None]


class EngineThread:
    """Runs an engine from `start` to `stop`."""

    def __init__(
        self,
        engine: Engine,
        *,
        deliver: Deliver,
        look: Callable[[Engine, float, bool], None] = lambda engine, now, ended: None,
        left: Callable[[], None] = lambda: None,
        interval: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """All functions are called on the engine's thread. `deliver` gets events, and why the engine died if it did;
        `look` the engine after each step, the time, and whether a sequence has ended or nothing is left to do; `left`
        is the last call. `interval`: seconds between two deliveries."""
        self.integrity_failures = 0  # checks of an idle engine that failed
        self._engine = engine
        self._deliver, self._look, self._left, self._interval = deliver, look, left, interval
        self._clock = clock
        self._orders: deque[Order] = deque()
        self._wake = threading.Condition()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def order(self, order: Order) -> None:
        """Have the thread call `order` with the engine before its next step."""
        with self._wake:
            self._orders.append(order)
            self._wake.notify()

    def abort(self, request_id: str) -> None:
        self.order(partial(Engine.abort, request_id=request_id))

    def stop(self) -> None:
        """End the thread once all orders are taken and nothing runs."""
        with self._wake:
            self._stop = True
            self._wake.notify()

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._serve(self._engine)
        except BaseException as error:  # the engine reports its own failures; no reader may wait for ever
            logger.exception("the engine's thread failed")
            self._deliver([], f"{type(error).__name__}: {error}")
        finally:
            self._left()

    def _serve(self, engine: Engine) -> None:
        delivered = -math.inf
        held: list[TokenEvent] = []  # events of steps that are faster than the interval
        while self._await_work(engine):
            while self._orders:
                self._orders.popleft()(engine)
            if engine.has_work:
                held += engine.step()
            now = self._clock()
            ended = any(event.finish for event in held) or not engine.has_work
            self._look(engine, now, ended)
            if engine.dead or (held and (ended or now - delivered >= self._interval())):
                self._deliver(held, engine.dead)
                held, delivered = [], now

    def _await_work(self, engine: Engine) -> bool:
        """Sleep until there is an order or the engine has work. False: the thread is to end."""
        if not self._rest(engine, IDLE_CHECK_SECONDS):
            self._check_integrity(engine)  # without the lock, so that orders can come in
            while not self._sleep(engine, 0) and self._tended(engine, engine.improve):
                pass
            self._rest(engine, math.inf)
        return bool(self._orders) or engine.has_work

    def _rest(self, engine: Engine, seconds: float) -> bool:
        """Sleep for `seconds` at most, and watch the processes of a split model meanwhile. True: there is an order, the
        engine has work, or the thread is to end."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            watch = None if engine.dead else engine.watch
            nap = min(left, WATCH_SECONDS if watch else math.inf)
            if self._sleep(engine, None if nap == math.inf else nap):
                return True
            if watch:
                self._tended(engine, watch)
        return False

    def _sleep(self, engine: Engine, seconds: float | None) -> bool:
        """Sleep for `seconds` at most. True: there is an order, the engine has work, or the thread is to end."""
        with self._wake:
            return self._wake.wait_for(lambda: bool(self._orders) or engine.has_work or self._stop, seconds)

    def _tended(self, engine: Engine, work: Callable[[], object]) -> bool:
        """Use an idle moment for some work, and return whether more is to do. A rank that is lost meanwhile ends the
        engine, as in a step."""
        try:
            return bool(work())
        except RankLost as error:
            engine.die(error)
            self._deliver([], engine.dead)
            return False

    def _check_integrity(self, engine: Engine) -> None:
        if engine.dead is not None:
            return
        try:
            engine.check()
        except AssertionError as error:
            logger.exception("the KV cache of an idle engine is inconsistent")
            self.integrity_failures += 1
            engine.dead = f"integrity: {error}"  # orders that are on their way end, too
            self._deliver([], engine.dead)
