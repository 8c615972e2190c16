"""The loading of a server's model, on a thread of its own, while the server already listens."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from paceline.llm import LLM
from paceline.models.weights import Progress

MAX_RETRY_SECONDS = 60
END_SECONDS = 10.0  # time for a cancelled loading to end; its thread is abandoned after that

Load = Callable[[Progress], LLM]


class Cancelled(BaseException):
    """Ends the thread that loads. No handler of loading errors catches it."""


class Loading:
    """How far a model is loaded. The object is the `Progress` that its loader calls."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._files = 1  # the target's, then one for each drafter that is a model
        self._done, self._total = 0, 0  # bytes of the file that is read now
        self._cancelled = False

    def __call__(self, done: int, total: int) -> None:
        if self._cancelled:
            raise Cancelled
        if done < self._done:
            self._files += 1
            self._began = self._clock()
        self._done, self._total = done, total

    @property
    def percent(self) -> int:
        """Share of the present file that is read."""
        return 100 * self._done // self._total if self._total else 0

    @property
    def doing(self) -> str:
        if self._total and self._done == self._total:
            return "preparing the engine"
        return "reading the weights of the target" if self._files == 1 else "reading the weights of a drafter"

    @property
    def retry_after(self) -> int:
        """Estimate the seconds until the present file is read, 1 to 60."""
        spent = self._clock() - self._began
        left = spent * (self._total - self._done) / self._done if self._done else spent
        return min(MAX_RETRY_SECONDS, max(1, round(left)))

    def cancel(self) -> None:
        self._cancelled = True

    async def run(self, load: Load) -> LLM:
        """Load on a thread. Cancelling the call ends the thread at its next report."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[LLM] = loop.create_future()
        thread = threading.Thread(target=self._run, args=(load, loop, outcome), name="loading", daemon=True)
        thread.start()
        try:
            return await outcome
        except asyncio.CancelledError:
            self.cancel()
            await asyncio.to_thread(thread.join, END_SECONDS)
            raise

    def _run(self, load: Load, loop: asyncio.AbstractEventLoop, outcome: asyncio.Future[LLM]) -> None:
        try:
            found = load(self)
        except Cancelled:
            return
        except BaseException as error:  # of any kind: the server ends with it
            self._tell(loop, outcome, outcome.set_exception, error)
        else:
            self._tell(loop, outcome, outcome.set_result, found)

    def _tell(self, loop: asyncio.AbstractEventLoop, outcome: asyncio.Future[LLM], call: Any, value: Any) -> None:
        def tell() -> None:
            if not outcome.done():  # cancelled in the meantime
                call(value)

        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(tell)
