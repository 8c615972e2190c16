"""A short real run of the model on a sample of the requests: what drafts are right, and what steps take.

The sample runs plain and with the drafter, alone and several requests at once, under the engine's own governor. Steps
are observed from outside, by the engine's statistics; drafts are heard at the drafter's guard.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from paceline.draft import Draft
from paceline.drafters.base import Ask
from paceline.engine.engine import Engine
from paceline.errors import EngineDead
from paceline.replay.drafts import Round
from paceline.replay.step_times import PassShape, PassTable, StepTimes, fitted
from paceline.types import OFF, Request, TokenEvent

AT_ONCE = (1, 2, 4, 8, 16)  # sequences that run together
MIN_STEPS = 8  # observed steps from which a number of sequences has a scale of its own
TOLD_APART = 2.0  # factor between the longest and the shortest pass from which a constant and a factor are fitted


@dataclass(frozen=True, slots=True)
class Sampled:
    """A request of the sample; `number` is that of its arrival, 0 if the record has no texts to sample."""

    number: int
    request: Request


@dataclass(frozen=True, slots=True)
class ObservedStep:
    shape: PassShape
    exact: bool  # the context of every row is known
    prompt_rows: int
    asks: int
    passes: int  # of the drafter's model
    fresh: int  # tokens of sequences that the drafter was asked about for the first time
    draft: float  # seconds
    verify: float
    host: float


@dataclass(slots=True)
class DraftLog:
    """Hears the drafts of one drafter. Implements paceline.drafters.guard.Listener."""

    sample: Sequence[Sampled]
    rounds: dict[int, dict[int, list[Round]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    asks: int = 0  # since `clear`
    passes: int = 0
    fresh: int = 0
    _numbers: dict[int, int] = field(default_factory=dict)  # key of a sequence → number of its arrival
    _open: dict[int, tuple[int, Draft]] = field(default_factory=dict)  # key → batch and draft, until it is judged

    def drafted(self, asks: Sequence[Ask], drafts: Sequence[Draft]) -> None:
        self.asks += len(asks)
        for ask, draft in zip(asks, drafts, strict=True):
            self.passes += _passes(draft)
            if ask.key not in self._numbers:
                self._numbers[ask.key] = self._number(ask)
                self.fresh += len(ask.tokens)
            if draft:
                self._open[ask.key] = len(asks), draft
            else:
                self.rounds[self._numbers[ask.key]][len(asks)].append(Round(0, 0, _passes(draft), 0))

    def judged(self, key: int, accepted: int) -> None:
        batch, draft = self._open.pop(key)
        found = Round(len(draft), draft.depth, _passes(draft), min(accepted, draft.depth))
        self.rounds[self._numbers[key]][batch].append(found)

    def clear(self) -> None:
        self.asks = self.passes = self.fresh = 0

    def forget(self) -> None:
        """Forget the sequences: the next run of the sample has others."""
        self._numbers.clear()
        self._open.clear()

    def _number(self, ask: Ask) -> int:
        text = ask.tokens.tolist()
        return next(each.number for each in self.sample if [*each.request.prompt] == text[: len(each.request.prompt)])


def _passes(draft: Draft) -> int:
    return draft.depth if draft.passes is None else draft.passes


def run_sample(
    engine: Engine,
    sample: Sequence[Sampled],
    table: PassTable,
    *,
    clock: Callable[[], float] = time.perf_counter,
    tick: Callable[[], None] = lambda: None,
) -> tuple[StepTimes, dict[int, dict[int, list[Round]]]]:
    """Run the sample, and return the times of steps and the rounds by arrival and batch. `tick`: called when a request
    has ended."""
    guard = engine.drafters.get(engine.default_drafter or "")
    log = DraftLog(sample)
    steps: list[ObservedStep] = []
    if guard is not None:
        guard.listener = log
    try:
        for at_once in _sizes(engine, len(sample)):
            for plain in (True, False) if guard is not None else (True,):  # in turns: the machine's speed may drift
                steps += _run(engine, sample, log, plain=plain, at_once=at_once, clock=clock, tick=tick)
                log.forget()
    finally:
        if guard is not None:
            guard.listener = None
    return _times(table, steps), log.rounds


def _sizes(engine: Engine, count: int) -> list[int]:
    """Numbers of requests that the sample runs at once."""
    return [size for size in AT_ONCE if size <= min(engine.max_sequences, count)]


def _run(
    engine: Engine,
    sample: Sequence[Sampled],
    log: DraftLog,
    *,
    plain: bool,
    at_once: int,
    clock: Callable[[], float],
    tick: Callable[[], None],
) -> list[ObservedStep]:
    """Run the sample once, `at_once` requests together."""
    salt = f"{'plain' if plain else 'drafts'}/{at_once}"  # no run finds the prompts of another in the cache
    waiting = [
        replace(each.request, cache_salt=salt, speculation=OFF if plain else each.request.speculation)
        for each in sample
    ]
    watch = _Watch(engine, log, clock, alone=at_once == 1)
    found = []
    while waiting or watch.lengths:
        while waiting and len(watch.lengths) < at_once:
            request = waiting.pop()
            engine.submit(request)
            watch.lengths[request.id] = len(request.prompt)
        step, ends = watch.step()
        found.append(step)
        for _ in range(ends):
            tick()
    return found


class _Watch:
    """Watches an engine step by step."""

    def __init__(self, engine: Engine, log: DraftLog, clock: Callable[[], float], *, alone: bool) -> None:
        """`alone`: one sequence runs at a time, so that it is known how far its prompt was read."""
        self.lengths: dict[str, int] = {}  # of sequences that run: tokens of prompt and answer
        self._begun: set[str] = set()  # sequences that have a token
        self._read = 0  # rows that were computed of the prompt of the sequence that runs alone
        self._engine = engine
        self._log = log
        self._clock = clock
        self._alone = alone

    def step(self) -> tuple[ObservedStep, int]:
        """Step the engine, and return what was seen of it and how many answers have ended."""
        engine, log = self._engine, self._log
        log.clear()
        before, began = replace(engine.stats), self._clock()
        events = engine.step()
        wall = self._clock() - began
        if engine.dead is not None:
            raise EngineDead(f"the engine stopped while it ran the sample ({engine.dead})")
        draft = engine.stats.time_draft - before.time_draft
        verify = engine.stats.time_verify - before.time_verify
        shape, prompt_rows = self._shape(events, engine.stats.rows - before.rows)
        exact = self._alone or not prompt_rows
        host = max(wall - draft - verify, 0.0)
        seen = ObservedStep(shape, exact, prompt_rows, log.asks, log.passes, log.fresh, draft, verify, host)
        return seen, self._advance(events, prompt_rows)

    def _shape(self, events: Sequence[TokenEvent], rows: int) -> tuple[PassShape, int]:
        """Return the shape of a pass, and how many of its rows are of prompts."""
        decoding = {event.request_id: 1 + event.drafted for event in events if event.request_id in self._begun}
        prompt = rows - sum(decoding.values())
        first, last = self._read, self._read + prompt
        read = sum(self.lengths[each] for each in decoding) + (last if prompt else 0)
        attended = (
            sum(self.lengths[each] * own for each, own in decoding.items()) + (last - first) * (first + last) // 2
        )
        outs = sum(decoding.values()) + len(events) - len(decoding)
        drafted = any(own > 1 for own in decoding.values())
        return PassShape(rows, outs, read, attended, drawing=len(events), drafted=drafted), prompt

    def _advance(self, events: Sequence[TokenEvent], prompt_rows: int) -> int:
        """Follow the sequences; return how many have ended."""
        self._read += prompt_rows
        for event in events:
            self._read = 0
            self._begun.add(event.request_id)
            self.lengths[event.request_id] += len(event.tokens)
            if event.finish is not None:
                del self.lengths[event.request_id]
        return sum(event.finish is not None for event in events)


def _times(table: PassTable, steps: Sequence[ObservedStep]) -> StepTimes:
    decoding = [step for step in steps if not step.prompt_rows]
    plain = _scales(table, [step for step in decoding if not step.shape.drafted])
    asked = [step for step in steps if step.asks]
    return StepTimes(
        passes=table,
        plain_scale=plain or {1: 1.0},
        drafted_scale=_scales(table, [step for step in decoding if step.shape.drafted]) or plain or {1: 1.0},
        prompt=_prompt(table, [step for step in steps if step.prompt_rows and step.exact]),
        host=_host(steps),
        draft=_draft(asked),
    )


def _scales(table: PassTable, steps: Sequence[ObservedStep]) -> dict[int, float]:
    """Compare passes inside steps with those of the table, by the number of sequences; empty without any."""
    sizes = sorted({step.shape.drawing for step in steps})
    groups = {size: [step for step in steps if step.shape.drawing == size] for size in sizes}
    known = {size: _scale(table, group) for size, group in groups.items() if len(group) >= MIN_STEPS}
    return known or ({1: _scale(table, steps)} if steps else {})


def _scale(table: PassTable, steps: Sequence[ObservedStep]) -> float:
    """Return the median of what passes took, by what they take in the table. Other work causes outliers."""
    expected = [table.seconds(step.shape) for step in steps]
    ratios = [step.verify / seconds for step, seconds in zip(steps, expected, strict=True) if seconds > 0]
    return float(np.median(ratios)) if ratios else 1.0


def _prompt(table: PassTable, steps: Sequence[ObservedStep]) -> tuple[float, float]:
    """Fit what passes over prompts took: seconds that each takes beside the table's, and a factor of the table's.

    The errors that are made small are relative ones. Passes of about one length have a factor alone, because nothing
    tells it from a constant."""
    seen = [(seconds, step.verify / seconds) for step in steps if (seconds := table.seconds(step.shape)) > 0]
    shortest, longest = min(seen, default=(0.0, 1.0))[0], max(seen, default=(0.0, 1.0))[0]
    if longest < TOLD_APART * shortest or len(seen) < MIN_STEPS:
        return 0.0, _scale(table, steps)
    constant, scale = fitted([(1 / seconds, 1.0) for seconds, _ in seen], [ratio for _, ratio in seen])
    return constant, scale


def _host(steps: Sequence[ObservedStep]) -> tuple[float, float, float]:
    features = [(1.0, step.shape.drawing, step.prompt_rows) for step in steps]
    first, second, third = fitted(features, [step.host for step in steps])
    return first, second, third


def _draft(steps: Sequence[ObservedStep]) -> tuple[float, float, float, float]:
    if not steps:
        return 0.0, 0.0, 0.0, 0.0
    features = [(1.0, step.asks, step.passes, step.fresh) for step in steps]
    call, ask, level, fresh = fitted(features, [step.draft for step in steps])
    return call, ask, level, fresh
