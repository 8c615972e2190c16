"""The bucket that a step wants: the smallest of the grid in which all its seats find what they ask for.

Which lanes edit or score is known from the sequences written to them. Drafters that find fewer tokens than they
may, and offers of the host, get rows for what they have found lately.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from paceline.kernels.edit_reference import Edits
from paceline.runner.rounds.buckets import Bucket, Drafts, Grid, judged_count
from paceline.runner.rounds.device_state import edits_of
from paceline.runner.rounds.protocol import DeviceDrafter, Landed, Seat
from paceline.runner.rounds.rules import judged
from paceline.runner.rounds.scores import Scorer
from paceline.runner.rounds.traits import (
    copies_alone,
    drafter_of,
    drafts_trees,
    longest_copy,
    longest_draft,
    passed_length,
    taps_of,
)
from paceline.sampling.sampler import Sampler

DECAY = 0.9  # weight of the past in running averages of drafts
FOUND_MARGIN = 1.5  # factor: rows reserved for found tokens = this × their average
OFFERED = "the host's offers"  # stands for the drafter of seats with an offer


class Demand(NamedTuple):
    """Everything that the seats of a step ask for, except for the number of rows."""

    bucket: Bucket  # without rows
    inside: int  # tokens that the device's drafter may draft for all seats
    offered: int  # tokens that the host may offer
    finds_fewer: bool  # drafts may be shorter than asked for, at no cost of the device
    by_rows: dict[int, Bucket]  # the bucket with the rows that it has had


class WantedBuckets:
    def __init__(self, grid: Grid, drafters: Mapping[str, DeviceDrafter], scorer: Scorer, *, vocab_size: int) -> None:
        self._grid = grid
        self._drafters = drafters
        self._scorer = scorer
        self._vocab_size = vocab_size
        self._edited: set[int] = set()  # lanes that edit logits by more than a mask
        # With masks and without them: what the latest step asked for, and the demand that it had.
        self._latest: dict[bool, tuple[Sequence[Seat], str | None, int, Demand]] = {}
        self._found: dict[str, float] = defaultdict(lambda: 1.0)  # drafter → found tokens / allowed tokens

    def write(self, lane: int, sampler: Sampler) -> None:
        """Begin a sequence in a lane."""
        self._scorer.write(lane, sampler)
        self._latest.clear()
        (self._edited.add if edits_of(sampler) & ~Edits.MASKS else self._edited.discard)(lane)

    def edits(self, lanes: Sequence[int]) -> bool:
        """Return whether a lane edits logits by more than a mask."""
        return not self._edited.isdisjoint(lanes)

    def find(self, seats: Sequence[Seat], drafter: str | None, context: int, *, masks: bool = False) -> Bucket:
        """Return the bucket of a step. If seats are those of the latest step, with masks or without like this one, its
        rows alone may have changed."""
        bound, latest = self._grid.context(context), self._latest.get(masks)
        if latest is None or latest[:3] != (seats, drafter, bound):
            self._latest[masks] = latest = seats, drafter, bound, self._demand(seats, drafter, bound, masks=masks)
        demand = latest[3]
        rows = self._rows(demand, drafter)
        if rows not in demand.by_rows:
            demand.by_rows[rows] = replace(demand.bucket, rows=rows)
        return demand.by_rows[rows]

    def learn(self, bucket: Bucket, seats: Sequence[Seat], landed: Sequence[Landed]) -> None:
        """Learn how many of the allowed tokens were found in a step that ran in `bucket`."""
        pairs = [*zip(seats, landed, strict=True)]
        inside = [
            (seat.max_copy if seat.max_copy > seat.max_draft else seat.max_draft, len(one.drafted))
            for seat, one in pairs
            if seat.offer is None
        ]
        self._learn_found(bucket.drafter or "", inside, longest=max(bucket.draft, bucket.copies))
        if len(inside) < len(pairs):
            offered = [(seat.max_draft, len(one.drafted)) for seat, one in pairs if seat.offer is not None]
            self._learn_found(OFFERED, offered, longest=bucket.offers)

    def _demand(self, seats: Sequence[Seat], drafter: str | None, context: int, *, masks: bool) -> Demand:
        by_drafter = [seat.max_draft for seat in seats if seat.offer is None]
        by_lookup = [seat.max_copy for seat in seats if seat.offer is None]
        by_host = [seat.max_draft for seat in seats if seat.offer is not None] if len(by_drafter) < len(seats) else []
        lanes = [seat.lane for seat in seats]
        count = self._grid.seats(len(seats))
        by = None if drafter is None else drafter_of(self._drafters[drafter], count, self._grid.max_draft)
        finds_fewer = by is not None and looks_up(by)
        passed = passed_length(by, max(by_drafter, default=0), self._grid.max_draft)
        draft = self._grid.draft(passed, finds_fewer=finds_fewer)
        copies = self._grid.draft(min(max(by_lookup, default=0), longest_copy(by)), finds_fewer=True)
        offers = self._grid.draft(max(by_host, default=0), finds_fewer=True)
        edits, own = self.edits(lanes), judged(seats)
        bucket = Bucket(
            seats=count,
            rows=0,
            draft=draft,
            drafter=drafter if draft or copies or (by is not None and taps_of(by)) else None,
            context=context,
            edits=edits,
            scores=min(self._grid.scores(self._scorer.top(lanes)), 1 + self._vocab_size),
            offers=offers,
            copies=copies,
            rules=tuple(sorted({seats[index].rule for index in own})),
            judged=judged_count(len(own)),
            tapped=any(seat.tapped for seat in seats),
            masks=masks,
        )
        longest = [max(min(length, draft), copy) for length, copy in zip(by_drafter, by_lookup, strict=True)]
        return Demand(bucket, sum(longest), sum(by_host), finds_fewer or offers > 0, {})

    def _rows(self, demand: Demand, drafter: str | None) -> int:
        """Return the rows of a step's verification, by what drafters have found lately."""
        bucket = demand.bucket
        wanted = self._expected(drafter, demand.inside) + self._expected(OFFERED, demand.offered)
        return self._grid.rows(bucket.seats, bucket.longest, wanted, finds_fewer=demand.finds_fewer)

    def _expected(self, drafter: str | None, allowed: int) -> int:
        """Return how many rows to reserve for drafts of at most `allowed` tokens in all."""
        if not allowed or drafter is None or (drafter != OFFERED and not self._drafters[drafter].finds_fewer):
            return allowed
        return min(int(allowed * FOUND_MARGIN * self._found[drafter]) + 1, allowed)

    def _learn_found(self, drafter: str, counts: Sequence[tuple[int, int]], *, longest: int) -> None:
        """Learn which share of the allowed tokens, at most `longest` for a seat, was found."""
        if allowed := sum([most if most < longest else longest for most, _ in counts]):
            share = sum([found for _, found in counts]) / allowed
            self._found[drafter] = share + DECAY * (self._found[drafter] - share)


def drafts_of(
    drafters: Mapping[str, DeviceDrafter], grid: Grid, longest: Mapping[str, int]
) -> Iterator[tuple[str, Drafts]]:
    """Yield the drafts of all drafters, by the seats of their rounds. `longest`: tokens of a draft, by drafter."""
    for name, drafter in drafters.items():
        most = min(longest.get(name, grid.max_draft), grid.max_draft)
        by_seats = {count: drafter_of(drafter, count, grid.max_draft) or drafter for count in grid.sizes()}
        for by, seats in itertools.groupby(by_seats, key=by_seats.__getitem__):
            yield (
                name,
                Drafts(
                    longest=longest_draft(by, most),
                    finds_fewer=looks_up(by),
                    plain=bool(taps_of(by)),
                    whole=drafts_trees(by),
                    seats=tuple(seats),
                    copies=min(longest_copy(by), grid.max_draft),
                    copies_alone=copies_alone(by),
                ),
            )


def looks_up(drafter: DeviceDrafter) -> bool:
    """Tell whether a drafter finds fewer tokens than it may, and runs no pass for each of them, as a network does."""
    return drafter.finds_fewer and not taps_of(drafter) and not longest_copy(drafter)
