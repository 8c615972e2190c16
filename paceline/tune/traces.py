"""Traces of answers: how an engine came to them step by step, and how long the steps took.

Under the coupled rule neither the text nor the accepted part of a fixed draft depends on who else is in the batch. So a
trace of one batch size holds for all: `tune.predictions` puts the rounds of answers together again. Steps that read a
prompt are in no trace.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.audit.replay import Replay
from paceline.bench.offline import Cell, requests_of
from paceline.bench.workloads import BenchPrompt
from paceline.engine.engine import Engine
from paceline.errors import EngineDead
from paceline.types import Finish, TokenEvent


class Round(NamedTuple):
    """One step of a sequence."""

    tokens: int  # new tokens that count
    drafted: int


Rounds = Sequence[Round]  # of one answer, from its second token on


class Step(NamedTuple):
    """One step of a batch that only decodes."""

    sequences: int
    rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Trace:
    """A batch of prompts, decoded once."""

    answers: list[Replay]
    rounds: list[list[Round]]  # of each answer
    steps: list[Step] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A prompt and its plain answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    max_tokens: int
    stopped: bool  # the last token is a stop

    def useful(self, done: int) -> int:
        """Return the tokens that a draft behind the first `done` tokens of the answer may have: the last token of the
        longest answer is never drafted."""
        return self.max_tokens - 1 - done


def trace(
    engine: Engine,
    cell: Cell,
    prompts: Sequence[BenchPrompt],
    tokens: Sequence[tuple[int, ...]],
    *,
    number: int = 0,
    ignore_eos: bool = False,
    salt: str | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Trace:
    """Decode a batch of prompts as `bench.offline.take_turn` does, and keep every step."""
    requests = requests_of(cell, prompts, tokens, number=number, ignore_eos=ignore_eos, salt=salt)
    places = {request.id: i for i, request in enumerate(requests)}
    found = Trace([Replay() for _ in requests], [[] for _ in requests])
    with engine.fixed_drafts() if cell.fixed or cell.plain else nullcontext():
        for request in requests:
            engine.submit(request)
        while engine.has_work:
            decodes = all(answer.tokens or answer.finish for answer in found.answers)
            began = clock()
            events = engine.step()
            seconds = clock() - began
            if engine.dead is not None:
                raise EngineDead(f"the engine stopped in the middle of the measurement ({engine.dead})")
            _take(found, events, places)
            if decodes and events:
                found.steps.append(Step(len(events), sum(1 + event.drafted for event in events), seconds))
    return found


def _take(found: Trace, events: Sequence[TokenEvent], places: dict[str, int]) -> None:
    for event in events:
        place = places[event.request_id]
        if found.answers[place].tokens and event.tokens:
            found.rounds[place].append(Round(len(event.tokens), event.drafted))
        found.answers[place].add(event)


def recorded(prompt: BenchPrompt, tokens: tuple[int, ...], answer: Replay) -> Recorded:
    stopped = answer.finish is Finish.STOP and isinstance(answer.stop, int)
    return Recorded(tokens, tuple(answer.tokens), prompt.max_tokens, stopped)
