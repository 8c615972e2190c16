"""Guards protect the engine from drafters: one that raises, hangs or returns invalid drafts costs only speed.

The engine calls every drafter through a guard. It turns a failure into an empty draft and a reason. After `FAILURES` in
a row, or a single hang, the drafter is never called again. A drafter that is not `inline` runs on a thread of its own,
and the engine waits for it no longer than `timeout` seconds.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from torch import Tensor

from paceline.draft import EMPTY, Draft
from paceline.drafters.base import Ask, Drafter, FeatureDrafter, Seen
from paceline.types import Off

logger = logging.getLogger(__name__)

FAILURES = 3  # failures in a row after which a drafter is out of use


class Guard:
    def __init__(self, drafter: Drafter, *, vocab_size: int, timeout: float) -> None:
        self.name = drafter.name
        self.max_draft = drafter.max_draft
        self.out: str | None = None  # why this drafter is no longer asked
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._failures = 0
        self._thread = None if drafter.inline else _Thread(timeout)
        self.taps = drafter.taps
        self.ends_drafts = drafter.ends_drafts
        self.needs_prediction = drafter.needs_prediction

    def start(self, key: int, lane: int, tokens: np.ndarray) -> None:
        self._call(lambda: self._drafter.start(key, lane, tokens))

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        before = self._failures
        drafts = self._call(lambda: self._drafter.propose(asks))
        problem = self._problem(asks, drafts)
        if problem is None:
            self._failures = 0
            return list(drafts)
        if self.out is None and self._failures == before:
            self._fail(f"returned {problem}")
        return [EMPTY] * len(asks)

    def observe(self, key: int, tokens: np.ndarray, accepted: int) -> None:
        self._call(lambda: self._drafter.observe(key, tokens, accepted))

    def feed(self, features: Tensor, seen: Sequence[Seen], *, crowded: bool) -> dict[int, Off]:
        drafter = cast(FeatureDrafter, self._drafter)
        lost = self._call(lambda: drafter.feed(features, seen, crowded=crowded))
        return lost if isinstance(lost, dict) else {}

    def knows(self, page: int) -> bool:
        """Return False where hidden states of this page must be computed again; a drafter that is out needs none."""
        drafter = cast(FeatureDrafter, self._drafter)
        return self._call(lambda: drafter.knows(page)) is not False

    def stop(self, key: int) -> None:
        self._call(lambda: self._drafter.stop(key))

    def _problem(self, asks: Sequence[Ask], drafts: Any) -> str | None:
        if not isinstance(drafts, (list, tuple)) or len(drafts) != len(asks):
            return "something other than one draft for each ask"
        for ask, draft in zip(asks, drafts, strict=True):
            if not isinstance(draft, Draft):
                return f"a {type(draft).__name__} instead of a Draft"
            try:
                problem = draft.problem(vocab_size=self._vocab_size, max_length=ask.max_draft)
            except Exception as error:  # fields of another package's draft may be of any type
                return f"a draft that cannot be read ({type(error).__name__}: {error})"
            if problem is not None:
                return problem
        return None

    def _call(self, call: Callable[[], Any]) -> Any:
        if self.out is not None:
            return None
        try:
            return call() if self._thread is None else self._thread.run(call)
        except TimeoutError as error:
            self._failures = FAILURES
            self._fail(str(error))
        except Exception as error:  # a drafter is foreign code: whatever it raises must not reach the engine
            logger.warning("drafter %s raised", self.name, exc_info=error)
            self._fail(f"raised {type(error).__name__}: {error}")
        return None

    def _fail(self, what: str) -> None:
        self._failures += 1
        logger.warning("drafter %s %s", self.name, what)
        if self._failures >= FAILURES:
            self.out = f"drafter {self.name} is out: it {what}"


class _Thread:
    """A daemon thread that runs one call at a time; abandoned, not joined, when a call does not come back."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._calls: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="drafter", daemon=True).start()

    def run(self, call: Callable[[], Any]) -> Any:
        self._calls.put(call)
        try:
            result, error = self._results.get(timeout=self._timeout)
        except queue.Empty:
            raise TimeoutError(f"did not answer within {self._timeout:g} s") from None
        if error is not None:
            raise error
        return result

    def _serve(self) -> None:
        while True:
            call = self._calls.get()
            try:
                self._results.put((call(), None))
            except BaseException as error:  # handed over to the caller of run()
                self._results.put((None, error))
