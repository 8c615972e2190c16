"""Arrivals: the answers that recorded traffic asks for, each with the second at which it is due and its length.

A request with n answers arrives n times at once. What a record lacks is given by options, or is an error that names
the option; what cannot be replayed is left out and said.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace

from paceline.bench.arrivals import Load, times
from paceline.errors import InvalidRequest
from paceline.replay.traffic import RecordedAnswer, RecordedRequest, Traffic


@dataclass(frozen=True, slots=True)
class Arrival:
    request: RecordedRequest
    answer: RecordedAnswer
    due: float  # seconds from the first arrival
    number: int  # unique, from 1 on

    @property
    def id(self) -> str:
        return f"{self.request.id}/{self.answer.sample}"

    @property
    def total(self) -> int:
        """Tokens of prompt and answer."""
        return self.request.length + self.answer.length


@dataclass(frozen=True, slots=True)
class Schedule:
    arrivals: tuple[Arrival, ...]  # by `due`
    notes: tuple[str, ...]  # of the traffic, and what was left out or made up here
    changed: bool = False  # times, lengths or the set of requests are not those that the server had

    @property
    def seconds(self) -> float:
        """Time from the first arrival to the last."""
        return self.arrivals[-1].due if self.arrivals else 0.0

    @property
    def delivery(self) -> float:
        """Seconds that the server usually took beside the engine, before the first token of an answer."""
        return statistics.median(arrival.answer.delivery for arrival in self.arrivals) if self.arrivals else 0.0


def schedule(
    traffic: Traffic,
    *,
    max_context: int,
    rate: float | None = None,
    output_tokens: int | None = None,
    speed: float = 1.0,
    seed: int = 0,
) -> Schedule:
    """`rate`: requests a second, Poisson, instead of the recorded times. `output_tokens`: of answers whose length was
    not recorded. `speed`: factor by which time runs faster."""
    notes = list(traffic.notes)
    due = _due(traffic, rate=rate, speed=speed, seed=seed)
    found = [
        Arrival(request, answer, when, 0)
        for request, when in zip(traffic.requests, due, strict=True)
        for answer in _answers(request, output_tokens)
    ]
    unknown = sum(not request.answers for request in traffic.requests)
    if unknown and output_tokens is None:
        notes.append(f"{unknown} requests have no recorded end and are left out; --output-tokens N would give them one")
    elif unknown:
        notes.append(f"{unknown} requests have no recorded end: {output_tokens} tokens are taken for their answers")
    silent = [arrival for arrival in found if not arrival.answer.length]
    if silent:
        notes.append(f"{len(silent)} answers had no token (refused, aborted or only scored) and are left out")
    long = [arrival for arrival in found if arrival.answer.length and arrival.total > max_context]
    if long:
        notes.append(
            f"{len(long)} answers need more than the {max_context} tokens of the context, up to "
            f"{max(arrival.total for arrival in long)}, and are left out"
        )
    kept = [arrival for arrival in found if arrival.answer.length and arrival.total <= max_context]
    if not kept:
        raise InvalidRequest(f"nothing can be replayed: {'; '.join(notes)}")
    return Schedule(
        tuple(replace(arrival, number=i) for i, arrival in enumerate(kept, start=1)),
        tuple(notes),
        changed=rate is not None or speed != 1 or traffic.share < 1 or len(kept) < len(found),
    )


def _due(traffic: Traffic, *, rate: float | None, speed: float, seed: int) -> Iterator[float]:
    """Yield the second at which each request is due."""
    if rate is not None:
        yield from times(Load(rate=rate * speed), count=len(traffic.requests), arrivals="poisson", seed=seed)
        return
    began = traffic.requests[0].at
    for request in traffic.requests:
        if request.at is None or began is None:
            raise InvalidRequest(
                f"{request.where}: the arrival time was not recorded: give --rate R, requests a second"
            )
        yield (request.at - began) / speed


def _answers(request: RecordedRequest, output_tokens: int | None) -> tuple[RecordedAnswer, ...]:
    if request.answers or output_tokens is None:
        return request.answers
    return tuple(RecordedAnswer(sample, output_tokens, "length") for sample in range(request.sampling.n))
