"""Drafts on paper: how long the draft of a simulated round is, and how much of it is right.

`MeasuredDrafts` draws rounds that a real run of the model and its drafter made on a sample of the requests.
`SurvivalDrafts` draws from shares of drafts that are right up to each position: those of the record, or a given one.
Neither has any token. Draws depend on the request and its own number of rounds alone, never on its neighbours.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from paceline.errors import InvalidRequest
from paceline.replay.arrivals import Arrival

MIN_ROUNDS = 8  # rounds of a request below which the rounds of all requests speak for it


class Round(NamedTuple):
    """A draft and what became of it."""

    tokens: int  # drafted
    depth: int  # of the longest path
    passes: int  # of the drafter's model
    accepted: int

    def within(self, limit: int) -> Round:
        """Return this round if no draft may have more than `limit` tokens."""
        if self.tokens <= limit:
            return self
        depth = min(self.depth, limit)
        return Round(limit, depth, min(self.passes, depth), min(self.accepted, depth))


class Drafts(Protocol):
    source: str  # where acceptance comes from, for people

    def draw(self, arrival: Arrival, *, batch: int, limit: int, rng: random.Random) -> Round:
        """Draw the round of a sequence, one of `batch` that are asked for, with at most `limit` tokens."""


class MeasuredDrafts:
    """Rounds of sampled requests, by the number of sequences that drafted together. Every other request draws from the
    sampled one that is most like it."""

    def __init__(self, rounds: Mapping[int, Mapping[int, Sequence[Round]]], arrivals: Sequence[Arrival]) -> None:
        """`rounds`: by the number of a sampled arrival, then by batch. `arrivals`: all of them."""
        kept = {number: by_batch for number, by_batch in rounds.items() if any(by_batch.values())}
        if not kept:
            raise InvalidRequest("the drafter was never asked for a draft on the sampled requests: give --acceptance X")
        self._rounds = kept
        sampled = [arrival for arrival in arrivals if arrival.number in kept]
        self._donors = {arrival.number: _nearest(arrival, sampled) for arrival in arrivals}
        count = sum(len(each) for by_batch in kept.values() for each in by_batch.values())
        self.source = f"measured: {count} rounds of {len(kept)} sampled requests"

    def draw(self, arrival: Arrival, *, batch: int, limit: int, rng: random.Random) -> Round:
        by_batch = self._rounds[self._donors[arrival.number]]
        nearest = min((size for size in by_batch if by_batch[size]), key=lambda size: (abs(size - batch), size))
        return rng.choice(by_batch[nearest]).within(limit)


def _nearest(arrival: Arrival, sampled: Sequence[Arrival]) -> int:
    """Return the number of the sampled arrival that is most like this one: by recorded tokens per step, else drawn."""
    if any(arrival.number == other.number for other in sampled):
        return arrival.number
    mine = arrival.answer.tokens_per_step
    known = [(other.answer.tokens_per_step, other.number) for other in sampled]
    near = sorted((abs(theirs - mine), number) for theirs, number in known if theirs is not None and mine is not None)
    return near[0][1] if near else random.Random(arrival.number).choice(sampled).number


@dataclass(frozen=True, slots=True)
class Survival:
    """Shares of one request's drafts."""

    found: float  # share of steps that had a draft
    tokens: float  # of a draft, on average
    right: tuple[float, ...]  # [i]: share of drafts that are right up to and including position i


class SurvivalDrafts:
    def __init__(self, own: Mapping[int, Survival], all_requests: Survival, *, source: str) -> None:
        """`own`: by the number of an arrival; `all_requests`: of those without any of their own."""
        self._own = own
        self._all = all_requests
        self.source = source

    def draw(self, arrival: Arrival, *, batch: int, limit: int, rng: random.Random) -> Round:
        share = self._own.get(arrival.number, self._all)
        if rng.random() >= share.found:
            return Round(0, 0, 0, 0)
        whole = int(share.tokens)
        tokens = min(max(whole + (rng.random() < share.tokens - whole), 1), limit)
        chance, right = rng.random(), 0
        while right < min(tokens, len(share.right)) and chance < share.right[right]:
            right += 1
        return Round(tokens, tokens, tokens, right)


def given_acceptance(rate: float, *, max_draft: int) -> SurvivalDrafts:
    """Make drafts of `max_draft` tokens, each right with probability `rate` if all before it are."""
    right = tuple(rate ** (i + 1) for i in range(max_draft))
    return SurvivalDrafts({}, Survival(1.0, max_draft, right), source=f"given: {rate:g} for each drafted token")


def recorded_acceptance(arrivals: Sequence[Arrival], *, drafter: str) -> SurvivalDrafts:
    """Make drafts from what the record tells of this drafter. Raises InvalidRequest if that is nothing."""
    mine = [arrival for arrival in arrivals if drafter in str(arrival.answer.stats.get("drafter") or "").split("+")]
    every = _survival(mine)
    if every is None:
        raise InvalidRequest(
            f"the record has no drafts of {drafter!r}: record the prompts' texts, so that they can be sampled, or give "
            "--acceptance X"
        )
    own = {arrival.number: found for arrival in mine if (found := _survival([arrival], least=MIN_ROUNDS)) is not None}
    rounds = sum(int(arrival.answer.stats["rounds"]) for arrival in mine)
    return SurvivalDrafts(own, every, source=f"recorded: {rounds} rounds of {len(mine)} requests")


def _survival(arrivals: Sequence[Arrival], *, least: int = 1) -> Survival | None:
    """Sum the statistics of some requests; None if they had fewer rounds than `least`."""
    stats = [arrival.answer.stats for arrival in arrivals]
    rounds, steps, drafted = (sum(int(each.get(name, 0)) for each in stats) for name in ("rounds", "steps", "drafted"))
    if rounds < least or not steps or not drafted:
        return None
    places = [list(each.get("accepted_by_position", ())) for each in stats]
    deepest = max(map(len, places))
    counts = [sum(counted[i] for counted in places if i < len(counted)) for i in range(deepest)]
    return Survival(min(rounds / steps, 1.0), drafted / rounds, tuple(count / rounds for count in counts))
