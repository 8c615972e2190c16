"""The engine on a thread of its own (`engine/thread.py`), seen from asyncio.

    event loop                                engine thread
    submit, aclose ── orders ──▶ │ take orders, step, │
    Stream ◀── one call for all ─ │ step, … or sleep   │

All events of a step reach the event loop in one call. Steps that follow each other within `stream_interval` share a
call, because waking the event loop takes time from a small model's step; an event that ends a sequence never waits.

Every request ends exactly once: each of its samples gets one event with `finish` set, whatever happens to the reader,
the engine or the thread. If the engine is dead, the log has the reason, /health is 503, and requests are refused until
the server is restarted. If it died of a lost rank, the server ends (`server/process.py`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from paceline.engine.engine import Engine
from paceline.engine.stats import Snapshot
from paceline.engine.thread import EngineThread
from paceline.errors import EngineDead, InvalidRequest, NotReady, PacelineError, QueueFull
from paceline.llm import LLM
from paceline.server import logs
from paceline.server.loading import Loading
from paceline.server.measured import Decisions
from paceline.server.stream import Stream
from paceline.server.tenants import Tenants
from paceline.types import Finish, Request, SequenceStats, TokenEvent

T = TypeVar("T")
State = Literal["starting", "ready", "draining", "dead"]
SNAPSHOT_SECONDS = 0.05  # time between two snapshots while no sequence ends
JOIN_SECONDS = 10.0  # time for the thread to end; it is abandoned after that


class Bridge:
    """The engine as routes see it. Belongs to one event loop, from `start` to `close`."""

    def __init__(
        self,
        llm: LLM | None = None,
        *,
        model: str,
        max_waiting: int = 256,
        stream_interval: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.loading = Loading()
        self.model = model
        self.max_waiting = max_waiting  # sequences; may change at any time
        self.stream_interval = stream_interval  # seconds; may change at any time
        self.state: State = "starting"
        self.dead: str | None = None  # reason of the state "dead"; for the log alone, since it may name internals
        self.on_death: Callable[[], None] = lambda: None  # called on the loop when the engine has died
        self.listeners: list[Callable[[TokenEvent], None]] = []  # called on the loop with every event, read or not
        self.watchers: list[Callable[[Request], None]] = []  # called on the loop with every request that is taken
        self.tenants = Tenants()
        self._clock = clock
        self._llm: LLM | None = None
        self._streams: dict[str, Stream] = {}
        self._sequences = 0  # not ended yet
        self._ended_at: deque[float] = deque(maxlen=32)  # times of the latest ends, for retry_after
        self._idle = asyncio.Event()  # set while there are no streams
        self._idle.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._left = asyncio.Event()  # set when the thread has gone
        # Written by the engine's thread.
        self._snapshot = Snapshot()
        self._looked = -math.inf  # time of the snapshot
        self._decisions = Decisions()
        if llm is not None:
            self.adopt(llm)

    @property
    def llm(self) -> LLM:
        """The model. Raises NotReady before it is loaded."""
        if self._llm is None:
            raise NotReady(
                f"the server is starting: {self.loading.doing}, {self.loading.percent} % loaded; try again later",
                retry_after=self.loading.retry_after,
            )
        return self._llm

    def adopt(self, llm: LLM) -> None:
        """Take the model that is to be served, before the start."""
        self._llm = llm
        self._snapshot = llm.engine.snapshot()

    async def start(self) -> None:
        assert self._llm is not None, "a bridge starts with a model"
        assert self.state == "starting", f"a bridge is started once, and this one is {self.state}"
        self._loop = asyncio.get_running_loop()
        self._thread = EngineThread(
            self._llm.engine,
            deliver=self._post,
            look=self._look,
            left=lambda: self._tell(self._left.set),
            interval=lambda: self.stream_interval,
            clock=self._clock,
        )
        self._looked = self._clock()
        self._thread.start()
        self.state = "ready"

    async def drain(self, timeout: float) -> None:
        """Take no new requests, and return when the running ones have ended. After `timeout` seconds they are aborted.

        A second call with a shorter timeout does not wait for the first."""
        if self.state in ("starting", "ready"):
            self.state = "draining"
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            self.abort_all()
            await self._idle.wait()

    async def close(self) -> None:
        """Abort everything that still runs, and end the thread."""
        if self.state in ("starting", "ready"):
            self.state = "draining"
        if self._loop is None:
            return
        self.abort_all()
        self._thread.stop()
        try:
            async with asyncio.timeout(JOIN_SECONDS):
                await self._left.wait()
            self._thread.join()
        except TimeoutError:
            self._die(f"a step did not end within {JOIN_SECONDS:g} s of closing")

    def submit(self, *requests: Request) -> Stream:
        """Take all of these requests or none, and return the stream of their events.

        Raises every error that is known without the engine's thread. If the engine refuses a request later, the stream
        raises its error."""
        if self.state == "dead":
            raise EngineDead("the engine stopped after an internal error; restart the server")
        if self.state != "ready":
            raise NotReady(f"the server is {self.state}; try another one, or again later")
        for request in requests:
            if request.id in self._streams:
                raise InvalidRequest(f"request id {request.id!r} is in use: choose another, or wait for its end")
            self.llm.engine.validate(request)
        self._check_room(requests)
        stream = Stream(requests, self._abandon)
        for request in requests:
            self._take(request, stream)
        return stream

    def abort_all(self) -> None:
        """Abort everything that runs or waits. Readers get their last events."""
        self._abandon([*self._streams])

    def wake(self) -> None:
        """Let an idle engine look again for work to do in idle moments."""
        self._thread.order(lambda engine: None)

    def show(self, snapshot: Snapshot) -> None:
        """Take a snapshot that was made on the engine's thread without a step."""
        self._snapshot = snapshot

    async def on_engine(self, order: Callable[[Engine], T]) -> T:
        """Run `order` on the engine's thread, between two steps. Returns what it returns, and raises what it raises."""
        if self._loop is None or self.state == "dead" or self._left.is_set():
            raise NotReady(f"the server is {self.state}; try again later")
        done: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._thread.order(lambda engine: _settle(done, partial(order, engine)))
        left = asyncio.ensure_future(self._left.wait())
        outcome = asyncio.wrap_future(done)
        await asyncio.wait((outcome, left), return_when=asyncio.FIRST_COMPLETED)
        left.cancel()
        if not outcome.done():
            outcome.cancel()
            raise NotReady(f"the server is {self.state}; try another one")
        return outcome.result()

    def stats(self) -> Snapshot:
        """Return the latest snapshot of the engine, taken between two steps."""
        return self._snapshot

    @property
    def integrity_failures(self) -> int:
        """Checks of an idle engine that failed."""
        return 0 if self._loop is None else self._thread.integrity_failures

    @property
    def open_requests(self) -> int:
        return len(self._streams)

    # On the event loop.

    def _check_room(self, requests: Sequence[Request]) -> None:
        """Raise QueueFull unless each request has room for one sequence. Its other samples are then taken, too.

        All requests are of one tenant. When others have filled the queue, it still has its share."""
        places = self.llm.engine.max_sequences
        before_last = self._sequences + sum(request.sampling.n for request in requests[:-1])
        full = before_last >= places + self.max_waiting
        if full and not self.tenants.keeps_to_share(requests, places=self.max_waiting):
            waiting = max(0, self._sequences - places)
            raise QueueFull(
                f"{waiting} sequences wait already, {self.max_waiting} may; try again later",
                retry_after=self._retry_after(),
            )

    def _take(self, request: Request, stream: Stream) -> None:
        if stream.record is not None and stream.record.wants_prompts:
            stream.record.prompts.append(self.llm.tokenizer.decode(request.prompt, skip_special=False))
        self._streams[request.id] = stream
        self._sequences += request.sampling.n
        self.tenants.take(request)
        self._idle.clear()
        self._thread.order(lambda engine: self._enter(engine, request))
        for watcher in self.watchers:
            watcher(request)

    def _abandon(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._thread.abort(request_id)

    def _deliver(self, events: list[TokenEvent], dead: str | None) -> None:
        """Hand the events of a step to their streams, then to the listeners. `dead`: why the engine died, if it did."""
        for event in events:
            self._hand(event)
        if dead is not None:
            events += self._die(dead)
        for event in events:  # last, so that a listener that fails costs no reader an event
            for listener in self.listeners:
                listener(event)

    def _hand(self, event: TokenEvent) -> None:
        stream = self._streams.get(event.request_id)
        if stream is None or event.sample not in stream.open[event.request_id]:
            return
        stream.take(event)
        if event.finish is not None:
            self.tenants.end(stream.requests[event.request_id], event)
            self._count_end(event.request_id, stream, 1)

    def _count_end(self, request_id: str, stream: Stream, sequences: int) -> None:
        self._sequences -= sequences
        self._ended_at.append(self._clock())
        if request_id not in stream.open:
            del self._streams[request_id]
            if not self._streams:
                self._idle.set()

    def _refuse(self, request: Request, error: PacelineError) -> None:
        stream = self._streams.get(request.id)
        if stream is None:  # all has ended in the meantime
            return
        stream.fail(request.id, error)
        self.tenants.refuse(request, request.sampling.n)
        self._count_end(request.id, stream, request.sampling.n)

    def _die(self, reason: str) -> list[TokenEvent]:
        """Mark the engine dead and end every open sequence. Return the last events that their streams got."""
        if self.dead is None:
            logs.say("engine died", level=logging.ERROR, reason=reason)
        self.state, self.dead = "dead", reason
        events = [
            _last_word(stream.requests[request_id], sample, reason)
            for request_id, stream in self._streams.items()
            for sample in stream.open[request_id]
        ]
        for event in events:
            self._hand(event)
        self.on_death()
        return events

    def _retry_after(self) -> int:
        """Estimate the seconds until a place is free, 1 to 60, from the mean time between the latest ends."""
        if len(self._ended_at) < 2:
            return 1
        pace = (self._ended_at[-1] - self._ended_at[0]) / (len(self._ended_at) - 1)
        return min(60, max(1, math.ceil(pace)))

    # On the engine's thread.

    def _look(self, engine: Engine, now: float, ended: bool) -> None:
        if now - self._looked > SNAPSHOT_SECONDS or ended:
            self._snapshot, self._looked = engine.snapshot(), now
            self._decisions.look(self._snapshot, at=now)

    def _enter(self, engine: Engine, request: Request) -> None:
        try:
            engine.submit(request, validated=True)  # `Bridge.submit` has validated it
        except EngineDead:
            self._post([], engine.dead)
        except PacelineError as error:
            self._tell(self._refuse, request, error)

    def _post(self, events: list[TokenEvent], dead: str | None) -> None:
        self._tell(self._deliver, events, dead)

    def _tell(self, call: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: a step hung, and no reader is left
            self._loop.call_soon_threadsafe(call, *args)


def _settle(done: concurrent.futures.Future[T], work: Callable[[], T]) -> None:
    """Do some work, and hand its result or its error over: whoever asked for it waits on another thread."""
    if not done.set_running_or_notify_cancel():
        return
    try:
        done.set_result(work())
    except BaseException as error:  # of any kind: it belongs to whoever asked, not to the engine's thread
        done.set_exception(error)


def _last_word(request: Request, sample: int, reason: str) -> TokenEvent:
    stats = SequenceStats(prompt_tokens=len(request.prompt))
    return TokenEvent(request_id=request.id, sample=sample, finish=Finish.ERROR, error=reason, stats=stats)
