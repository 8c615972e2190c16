"""Requests, and runs of an engine to their end.

A run checks on the way what must always hold: the KV cache is consistent after every step, every sequence ends exactly
once and says nothing afterwards, and when all is over no page or lane is held.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from paceline.types import (
    OFF,
    Finish,
    Logprob,
    Origin,
    Request,
    SamplingParams,
    SequenceStats,
    Speculation,
    TokenEvent,
)
from tests.rig import Rig
from tests.tiny_models import VOCAB

Key = tuple[str, int]  # request id, sample


@dataclass
class Told:
    """All that an engine said of one sequence."""

    tokens: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    text: str = ""
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: tuple[Logprob | None, ...] | None = None
    finish: Finish | None = None
    stop: str | int | None = None
    error: str | None = None
    stats: SequenceStats = field(default_factory=SequenceStats)

    def add(self, event: TokenEvent) -> None:
        assert self.finish is None, f"an event after the end: {event}"
        self.tokens += event.tokens
        self.origins += event.origins
        self.text += event.text
        self.logprobs += event.logprobs
        assert len(event.origins) == len(event.tokens)
        assert (event.stats is None) == (event.finish is None), "statistics belong to the last event, and only there"
        if event.finish is not None:
            assert event.stats is not None
            self.finish, self.stop, self.error, self.stats = event.finish, event.stop, event.error, event.stats
            self.prompt_logprobs = event.prompt_logprobs


class Run:
    """Requests on their way through an engine."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.told: dict[Key, Told] = {}
        self.steps = 0

    def submit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.rig.engine.submit(request)
            self.told |= {(request.id, sample): Told() for sample in range(request.sampling.n)}

    def step(self) -> list[TokenEvent]:
        events = self.rig.engine.step()
        for event in events:
            self.told[event.request_id, event.sample].add(event)
        self.rig.engine.check()
        self.check_lanes()
        self.steps += 1
        assert self.steps < 5000, "the engine does not come to an end"
        return events

    def finish(self) -> dict[Key, Told]:
        while self.rig.engine.has_work:
            self.step()
        self.check_over()
        return self.told

    def check_lanes(self) -> None:
        """What the device sees of a running sequence is what the engine knows of it."""
        for sequence in self.rig.engine._scheduler.running:
            length = int(self.rig.lanes.lengths_np[sequence.lane])
            assert self.rig.lanes.tokens_np[sequence.lane, :length].tolist() == sequence.tokens
            assert sequence.span is not None
            pages = self.rig.lanes.pages_np[sequence.lane].tolist()
            assert [page for page in pages if page >= 0] == sequence.span.pages

    def check_over(self) -> None:
        unfinished = [key for key, told in self.told.items() if told.finish is None]
        assert not unfinished, f"never ended: {unfinished}"
        assert self.rig.lanes.free == len(self.rig.lanes.lengths), "a lane was lost"
        assert self.rig.cache.pool.held == 0, "a page was lost"


def run(rig: Rig, requests: Sequence[Request], *, every: int = 0) -> dict[Key, Told]:
    """All requests to the end; with `every`, one more arrives after that many steps each time."""
    going = Run(rig)
    if not every:
        going.submit(requests)
    for request in requests if every else ():
        going.submit([request])
        for _ in range(every):
            going.step()
    told = going.finish()
    assert rig.engine.dead is None, rig.engine.dead
    return told


def tokens_of(told: Mapping[Key, Told]) -> dict[Key, list[int]]:
    return {key: each.tokens for key, each in told.items()}


def plain(requests: Iterable[Request]) -> list[Request]:
    """The same requests without speculation."""
    return [replace(request, speculation=OFF) for request in requests]


def prompt(length: int, *, seed: int, repeat: bool = False) -> tuple[int, ...]:
    """Random tokens; with `repeat` a random phrase over and over, which lookup drafters like."""
    drawn = np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
    return tuple(itertools.islice(itertools.cycle(drawn[: max(2, length // 4)]), length) if repeat else drawn)


GREEDY = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.4),
    SamplingParams(temperature=0, logit_bias={7: 2.0, 11: -3.0}, min_tokens=9, stop_ids=(3, 4, 5, 6)),
    SamplingParams(temperature=0, n=2),
)
SAMPLED = (
    SamplingParams(temperature=1, seed=5),
    SamplingParams(temperature=0.7, top_k=5, seed=2**64 - 1),
    SamplingParams(temperature=0.9, top_p=0.6, seed=3, n=3),
    SamplingParams(temperature=1.3, min_p=0.05, seed=4, repetition_penalty=1.3, presence_penalty=0.5),
    SamplingParams(
        temperature=0.8, top_k=20, top_p=0.9, seed=6, frequency_penalty=0.7, allowed_tokens=tuple(range(50))
    ),
)
# Both, and sequences that end early while a step is in flight.
DEVICE_PARAMS: Mapping[str, Sequence[SamplingParams]] = {
    "greedy": (*GREEDY, SamplingParams(temperature=0, stop_ids=tuple(range(3, 10)))),
    "sampled": (*SAMPLED, SamplingParams(temperature=1.3, min_p=0.05, seed=4, stop_ids=tuple(range(3, 10)))),
}
LENGTHS = (1, 50, 17, 9, 33, 16, 70)  # of prompts: shorter and longer than a step's rows, at and off a page's end


def mixed_requests(
    params: Sequence[SamplingParams], speculations: Sequence[Speculation], *, count: int, max_tokens: int = 24
) -> list[Request]:
    """Requests that differ in length, parameters and speculation, all in one batch."""
    return [
        Request(
            id=str(i),
            prompt=prompt(LENGTHS[i % len(LENGTHS)], seed=i, repeat=i % 3 == 1),
            sampling=replace(params[i % len(params)], max_tokens=max_tokens - i % 5),
            speculation=speculations[i % len(speculations)],
        )
        for i in range(count)
    ]
