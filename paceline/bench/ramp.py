"""A load that rises and falls, on two engines side by side: one without drafters, one with the default settings.

    requests  most ┤        ╭──────╮
                   │     ╭──╯      ╰──╮
                 1 ┼─────╯            ╰──────        by the engine's own seconds; each bend by factors
                   └──────────────────────────

Each engine has a clock that runs only while it works. The engines take turns of a fraction of a second, so that both
see the machine at the same speed, and meet the same load at the same time of their own clocks. As many requests are
open as the load says; the k-th one of both engines is the same. Windows of equal length are compared one by one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.bench.workloads import BenchPrompt
from paceline.engine.stats import EngineStats
from paceline.errors import EngineDead
from paceline.types import OFF, Finish, Request, SamplingParams, Speculation, TokenEvent

SLICE_SECONDS = 0.25  # of one engine's turn
LEVEL, RISE, TOP, FALL = 0.15, 0.25, 0.15, 0.25  # shares of the time: one request, rising, all requests, falling
WARM_UP_REQUESTS = 2  # before the clocks start


class Steps(Protocol):
    """The part of an engine that a ramp uses."""

    stats: EngineStats

    def submit(self, request: Request) -> None: ...

    def step(self) -> list[TokenEvent]: ...

    @property
    def has_work(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Ramp:
    most: int  # requests that are open at the top
    seconds: float
    window: float = 5.0  # seconds

    def wanted(self, now: float) -> int:
        """Return how many requests are open at a time."""
        place = now / self.seconds
        up, down = (place - LEVEL) / RISE, 1 - (place - LEVEL - RISE - TOP) / FALL
        return round(math.exp(math.log(self.most) * min(max(min(up, down), 0.0), 1.0)))

    @property
    def fallen(self) -> float:
        """Time at which one request is left open."""
        return (LEVEL + RISE + TOP + FALL) * self.seconds

    @property
    def windows(self) -> int:
        return int(self.seconds // self.window)


@dataclass(slots=True)
class Window:
    tokens: int = 0
    seconds: float = 0.0
    sequence_seconds: float = 0.0  # seconds × open requests

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class Arm:
    """One engine with its clock, and what it did in each window."""

    engine: Steps
    speculation: Speculation
    prompts: Sequence[BenchPrompt]
    tokens: Sequence[tuple[int, ...]]  # of each prompt
    temperatures: Sequence[float]
    salt: str
    clock: Callable[[], float] = time.perf_counter
    now: float = 0.0
    begun: int = 0  # requests
    alone_at: float | None = None  # time after the fall at which one request was left
    back_at: float | None = None  # time after that at which a token was drafted
    windows: list[Window] = field(default_factory=list)
    _open: set[str] = field(default_factory=set)

    def run(self, ramp: Ramp, until: float) -> None:
        """Work until the own clock shows this time."""
        while self.now < until:
            while len(self._open) < ramp.wanted(self.now):
                self._begin()
            drafted, tokens, sequences = self.engine.stats.drafted, 0, len(self._open)
            before = self.clock()
            for event in self.engine.step():
                tokens += self._take(event)
            seconds = self.clock() - before
            self._count(ramp, tokens, seconds, sequences)
            self.now += seconds
            self._note_return(ramp, drafts=self.engine.stats.drafted > drafted)

    def finish(self) -> None:
        """Answer all requests that are open."""
        while self.engine.has_work:
            for event in self.engine.step():
                self._take(event)

    def warm_up(self) -> None:
        for _ in range(WARM_UP_REQUESTS):
            self._begin()
        self.finish()
        self.begun = 0

    def _begin(self) -> None:
        place = self.begun % len(self.prompts)
        prompt = self.prompts[place]
        sampling = SamplingParams(
            temperature=self.temperatures[self.begun % len(self.temperatures)],
            max_tokens=prompt.max_tokens,
            seed=self.begun,
        )
        id = f"{self.salt} {self.begun}"
        salt = f"{self.salt} {self.begun // len(self.prompts)}"  # no drafter remembers an answer to the same prompt
        self.engine.submit(
            Request(id=id, prompt=self.tokens[place], sampling=sampling, speculation=self.speculation, cache_salt=salt)
        )
        self._open.add(id)
        self.begun += 1

    def _take(self, event: TokenEvent) -> int:
        if event.finish is Finish.ERROR:
            raise EngineDead(f"the engine stopped after an error ({event.error})")
        if event.finish is not None:
            self._open.discard(event.request_id)
        return len(event.tokens)

    def _count(self, ramp: Ramp, tokens: int, seconds: float, sequences: int) -> None:
        """Add a step to the window of its middle."""
        place = int((self.now + seconds / 2) / ramp.window)
        while len(self.windows) <= place:
            self.windows.append(Window())
        window = self.windows[place]
        window.tokens += tokens
        window.seconds += seconds
        window.sequence_seconds += seconds * sequences

    def _note_return(self, ramp: Ramp, *, drafts: bool) -> None:
        if self.now < ramp.fallen or len(self._open) > 1:
            return
        if self.alone_at is None:
            self.alone_at = self.now
        elif self.back_at is None and drafts:
            self.back_at = self.now


@dataclass(frozen=True, slots=True)
class Pair:
    """One ramp of both engines."""

    plain: list[Window]
    speculative: list[Window]
    back_seconds: float | None  # from the moment one request was left until the first draft; None: there was none


def run_pair(
    engines: tuple[Steps, Steps],
    ramp: Ramp,
    prompts: Sequence[BenchPrompt],
    tokens: Sequence[tuple[int, ...]],
    *,
    temperatures: Sequence[float],
    number: int,
    clock: Callable[[], float] = time.perf_counter,
    tick: Callable[[float], None] = lambda now: None,
) -> Pair:
    """Lead both engines, the plain one first, through the ramp. `tick` is called with the seconds that are done."""
    arms = [
        Arm(engine, speculation, prompts, tokens, temperatures, salt=f"{number} {name}", clock=clock)
        for engine, speculation, name in zip(engines, (OFF, Speculation()), ("plain", "default"), strict=True)
    ]
    for arm in arms if number == 0 else ():
        arm.warm_up()
    turns = math.ceil(ramp.seconds / SLICE_SECONDS)
    for turn in range(1, turns + 1):
        for arm in arms if turn % 2 else reversed(arms):
            arm.run(ramp, min(turn * SLICE_SECONDS, ramp.seconds))
        tick(turn * SLICE_SECONDS)
    for arm in arms:
        arm.finish()
    plain, default = arms
    back = None if default.alone_at is None or default.back_at is None else default.back_at - default.alone_at
    return Pair(plain.windows[: ramp.windows], default.windows[: ramp.windows], back)
