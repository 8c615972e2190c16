"""Guards protect the engine from drafters: one that raises, hangs or returns invalid drafts costs only speed.

The engine calls every drafter through a guard. It turns a failure into an empty draft and a reason. After `FAILURES` in
a row, or a single hang, the drafter is never called again. A drafter that is not `inline` runs on a thread of its own.
The engine waits for its drafts (`propose`) no longer than `timeout` seconds, or not at all (`exchange`), and never for
anything that returns nothing.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
from torch import Tensor

from paceline.draft import EMPTY, Draft
from paceline.drafters.base import Ask, Drafter, Ended, FeatureDrafter, Seen, Verified
from paceline.types import Off

logger = logging.getLogger(__name__)

FAILURES = 3  # failures in a row after which a drafter is out of use


class Listener(Protocol):
    """Is told of every draft that the engine asks for, and of what became of it: for measurements."""

    def drafted(self, asks: Sequence[Ask], drafts: Sequence[Draft]) -> None:
        """Hear the drafts for these asks; those of a drafter that failed are empty."""

    def judged(self, key: int, accepted: int) -> None:
        """Hear how many tokens of the latest draft for a sequence were right; not called if the sequence has ended."""


class Guard:
    def __init__(self, drafter: Drafter, *, vocab_size: int, timeout: float) -> None:
        self.name = drafter.name
        self.max_draft = drafter.max_draft
        self.max_context = drafter.max_context
        self.out: str | None = drafter.unfit  # why this drafter is no longer asked
        self.fault: str | None = None  # what it did wrong when it last failed; None: it never failed
        self.memory: Callable[[], int] | None = None  # bytes of this process; None: nobody watches the memory
        self.grown = 0  # bytes by which the process grew within calls of this drafter, while its memory is watched
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._failures = 0
        self._thread = None if drafter.inline else _Thread(timeout)
        self._posted: deque[Future[Any]] = deque()  # calls whose results nobody waits for, oldest first
        self._proposing: tuple[Sequence[Ask], Future[Any]] | None = (
            None  # asks that the thread works on, and its drafts
        )
        self._lost: deque[Any] = deque()  # results of `feed`, which a thread may add to
        self.taps = drafter.taps
        self.shares_kv = drafter.shares_kv
        self.hears_logits = drafter.hears_logits
        self.ends_drafts = drafter.ends_drafts
        self.weighs_cost = drafter.weighs_cost
        self.copies = drafter.copies
        self.needs_prediction = drafter.needs_prediction
        self.listener: Listener | None = None
        self._observes = getattr(drafter.observe, "__func__", None) is not Drafter.observe  # False: in vain

    def start(self, key: int, lane: int, tokens: np.ndarray) -> None:
        self._post(self._drafter.start, key, lane, self._kept(tokens))

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """Ask for drafts, and wait for them."""
        before = self._failures
        drafts = self._checked(asks, self._call(self._drafter.propose, asks), failed=self._failures > before)
        if self.listener is not None:
            self.listener.drafted(asks, drafts)
        return drafts

    def exchange(self, asks: Sequence[Ask]) -> list[tuple[Ask, Draft]]:
        """Ask for drafts, and return the asks that are answered by now, which may be earlier ones.

        An inline drafter answers at once. One on a thread takes new asks when it has answered the earlier ones; nothing
        waits for it, and asks that come while it is busy are dropped."""
        if self._thread is None:
            return list(zip(asks, self.propose(asks), strict=True))
        answered = self._answered()
        if self._proposing is None and self.out is None:
            kept = [replace(ask, tokens=self._kept(ask.tokens)) for ask in asks]
            self._proposing = kept, self._thread.begin(lambda: self._drafter.propose(kept))
        return answered

    def _answered(self) -> list[tuple[Ask, Draft]]:
        """Take the thread's drafts if they are there. A thread that hangs puts the drafter out of use."""
        assert self._thread is not None
        self._settle_posted()
        if self.out is None and self._thread.hangs:
            self._fail_for_good(self._thread.hung)
        if self.out is not None or self._proposing is None or not self._proposing[1].done():
            return []
        (asks, future), self._proposing = self._proposing, None
        before = self._failures
        drafts = self._guarded(future.result)
        return list(zip(asks, self._checked(asks, drafts, failed=self._failures > before), strict=True))

    def _checked(self, asks: Sequence[Ask], drafts: Any, *, failed: bool) -> list[Draft]:
        """Return the drafts if all are valid, else empty ones; a call that `failed` has been counted already."""
        problem = self._problem(asks, drafts)
        if problem is None:
            self._failures = 0
            return list(drafts)
        if self.out is None and not failed:
            self._fail(f"returned {problem}")
        return [EMPTY] * len(asks)

    def observe(self, key: int, tokens: np.ndarray, accepted: int) -> None:
        if self.listener is not None:
            self.listener.judged(key, accepted)
        if self._observes:
            self._post(self._drafter.observe, key, self._kept(tokens), accepted)

    def feed(self, features: Tensor, seen: Sequence[Seen], *, crowded: bool, wait: bool = True) -> dict[int, Off]:
        """Hand over hidden states; return the sequences that the drafter has given up by now, with reasons.

        `wait` False: not for a thread, and the memory of the features must be its own from now on."""
        feed = partial(cast(FeatureDrafter, self._drafter).feed, features, seen, crowded=crowded)
        if self._thread is None:
            given = self._call(feed)
            return given if isinstance(given, dict) else {}
        (self._call if wait else self._post)(lambda: self._lost.append(feed()))
        lost: dict[int, Off] = {}
        while self._lost:
            given = self._lost.popleft()
            lost |= given if isinstance(given, dict) else {}
        return lost

    def hear(self, verified: Sequence[Verified]) -> None:
        """Tell what the target said, and wait: the logits are those of the next pass afterwards."""
        self._call(self._drafter.hear, verified)

    def knows(self, page: int, *, wait: bool = True) -> bool:
        """Return False where hidden states of this page must be computed again; a drafter that is out needs none.

        `wait` False: a drafter on a thread is not asked, and gets them again."""
        if not wait and self._thread is not None:
            return self.out is not None
        drafter = cast(FeatureDrafter, self._drafter)
        return self._call(drafter.knows, page) is not False

    def learn(self, ended: Ended) -> None:
        self._post(self._drafter.learn, ended._replace(tokens=self._kept(ended.tokens)))

    def stop(self, key: int) -> None:
        self._post(self._drafter.stop, key)

    def close(self) -> None:
        """Let the drafter go, also one that is out of use, and end its thread. No other call follows."""
        if self._thread is None:
            self._guarded(self._drafter.close)
        else:
            self._thread.begin(self._drafter.close)
            self._thread.end()
        self.out = f"drafter {self.name} was unloaded"

    def _problem(self, asks: Sequence[Ask], drafts: Any) -> str | None:
        if not isinstance(drafts, (list, tuple)) or len(drafts) != len(asks):
            return "something other than one draft for each ask"
        for ask, draft in zip(asks, drafts, strict=True):
            if draft is EMPTY:
                continue
            if not isinstance(draft, Draft):
                return f"a {type(draft).__name__} instead of a Draft"
            try:
                problem = draft.problem(vocab_size=self._vocab_size, max_length=ask.max_draft)
            except Exception as error:  # fields of another package's draft may be of any type
                return f"a draft that cannot be read ({type(error).__name__}: {error})"
            if problem is not None:
                return problem
        return None

    def _kept(self, tokens: np.ndarray) -> np.ndarray:
        """Return tokens that stay as they are until the call: a thread may come to it after the engine's next steps."""
        if self._thread is None:
            return tokens
        copy = tokens.copy()
        copy.flags.writeable = False
        return copy

    def _post(self, call: Callable[..., Any], *arguments: Any) -> None:
        """Make a call that returns nothing, without waiting for it."""
        if self._thread is None:
            self._call(call, *arguments)
        elif self.out is None:
            self._settle_posted()
            self._posted.append(self._thread.begin(partial(call, *arguments)))

    def _settle_posted(self) -> None:
        """Count the failures of posted calls that have come to their end."""
        while self.out is None and self._posted and self._posted[0].done():
            self._guarded(self._posted.popleft().result)

    def _call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Make a call and wait for its result; None if it fails."""
        if self._thread is None:
            return None if self.out is not None else self._guarded(call, *arguments)
        result = None if self.out is not None else self._guarded(self._thread.run, partial(call, *arguments))
        self._settle_posted()
        return result

    def _guarded(self, call: Callable[..., Any], *arguments: Any) -> Any:
        before = 0 if self.memory is None else self.memory()
        try:
            return call(*arguments)
        except _Hangs as error:
            self._fail_for_good(str(error))
        except Exception as error:  # a drafter is foreign code: whatever it raises must not reach the engine
            logger.warning("drafter %s raised", self.name, exc_info=error)
            self._fail(f"raised {type(error).__name__}: {error}")
        finally:
            if self.memory is not None:
                self.grown += self.memory() - before
        return None

    def _fail_for_good(self, what: str) -> None:
        self._failures = FAILURES
        self._fail(what)

    def _fail(self, what: str) -> None:
        self._failures += 1
        self.fault = what
        logger.warning("drafter %s %s", self.name, what)
        if self._failures >= FAILURES:
            self.out = f"drafter {self.name} is out: it {what}"


class _Hangs(Exception):
    """A call did not come back in time."""


class _Thread:
    """A daemon thread that runs one call at a time, in order; abandoned, not joined, when a call does not come back."""

    def __init__(self, timeout: float) -> None:
        self.hung = f"did not answer within {timeout:g} s"
        self._timeout = timeout
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._since: float | None = None  # time at which the running call began
        threading.Thread(target=self._serve, name="drafter", daemon=True).start()

    @property
    def hangs(self) -> bool:
        """True if the running call has taken too long."""
        since = self._since
        return since is not None and time.monotonic() - since > self._timeout

    def begin(self, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((call, future))
        return future

    def end(self) -> None:
        """End the thread after the calls that it has."""
        self._calls.put(None)

    def run(self, call: Callable[[], Any]) -> Any:
        future = self.begin(call)
        try:
            return future.result(timeout=self._timeout)
        except FutureTimeout:
            if future.done():
                raise  # the call itself raised a TimeoutError
            raise _Hangs(self.hung) from None

    def _serve(self) -> None:
        while (given := self._calls.get()) is not None:
            call, future = given
            self._since = time.monotonic()
            try:
                result = call()
            except BaseException as error:  # handed over to whoever takes the result
                self._since = None
                future.set_exception(error)
            else:
                self._since = None
                future.set_result(result)
