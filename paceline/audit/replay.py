"""Run requests through an engine and keep each answer, with the step and the origin of every token.

It judges nothing. Answers come in the order of the requests, whatever the concurrency.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.engine.engine import Engine
from paceline.errors import EngineDead
from paceline.types import Finish, Origin, Request, SequenceStats, TokenEvent

Tick = Callable[[], None]  # called whenever a request has ended


@dataclass(slots=True)
class Replay:
    """An answer, and the step of its sequence that each token came from."""

    tokens: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)  # step of the sequence that gave each token, from 1 on
    text: str = ""
    finish: Finish | None = None
    stop: str | int | None = None
    error: str | None = None
    logprob: float = 0.0  # sum over the tokens, if the request asks for log-probabilities
    stats: SequenceStats = field(default_factory=SequenceStats)

    def add(self, event: TokenEvent) -> None:
        step = self.steps[-1] + 1 if self.steps else 1
        self.tokens += event.tokens
        self.origins += event.origins
        self.steps += [step] * len(event.tokens)
        self.text += event.text
        if event.logprobs:
            self.logprob += sum(each.logprob for each in event.logprobs)
        if event.finish is not None:
            self.finish, self.stop, self.error = event.finish, event.stop, event.error
            self.stats = event.stats or self.stats


def replay(engine: Engine, requests: Sequence[Request], *, at_once: int, tick: Tick = lambda: None) -> list[Replay]:
    """Run all requests to their ends, `at_once` of them at a time; when one ends, the next is submitted."""
    found = {request.id: Replay() for request in requests}
    waiting, running = list(reversed(requests)), 0
    while waiting or running:
        while waiting and running < at_once:
            engine.submit(waiting.pop())
            running += 1
        for event in engine.step():
            found[event.request_id].add(event)
            if event.finish is not None:
                running -= 1
                tick()
        if engine.dead is not None:
            raise EngineDead(f"the engine stopped in the middle of the audit ({engine.dead})")
    return [found[request.id] for request in requests]
