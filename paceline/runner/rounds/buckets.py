"""The shapes in which rounds are recorded as graphs: a grid that is coarse where size costs little time.

A bucket fits any step that is no larger in any respect. Its seats are padded with the dummy lane and its rows with
padding, and tokens drafted beyond a seat's limit are not verified. Each dimension of the grid is as coarse as time
allows (H200):

    seats     two sizes per power of two: a padded seat has one position, and costs attention nearly nothing
    rows      64, then multiples of 64: up to 64 rows a product takes as long as reading its matrix
    draft     every pass of a drafting model costs, so the lengths are fine; a lookup has no passes: 4, 8, 16 …
    context   powers of four: programs of attention beyond a sequence's end stop at once
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

LEAST_CONTEXT = 512  # positions: smallest context bound of a bucket
START_CONTEXT = 8192  # positions: larger bounds are recorded at the start only if they are the largest
DRAFTS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)  # draft lengths of buckets; others are cut to these
LOOKUPS = (4, 8, 16, 32)  # draft lengths of drafters that find fewer tokens than asked for; others are rounded up
CHEAP_ROWS = 64  # rows up to which one more is nearly free, and the step between numbers of rows beyond
FLAGS = ("filters",)  # fields of a bucket that are True for a round that can do more


@dataclass(frozen=True, slots=True)
class Bucket:
    """Everything that fixes the shape of a round."""

    seats: int  # padded number of sequences
    rows: int  # rows of the verification, summed over seats; at most seats × (1 + draft)
    draft: int  # passes of the drafter; 0: plain decoding
    drafter: str | None
    context: int  # positions; no sequence is longer, and attention is divided for this length
    filters: bool  # True: a lane asks for top-k, top-p or min-p

    def serves(self, wanted: Bucket) -> bool:
        """Return True if a round of this bucket can run a step of the bucket `wanted`."""
        large = self.seats >= wanted.seats and self.rows >= wanted.rows
        long = self.draft >= wanted.draft and self.context >= wanted.context
        able = all(getattr(self, flag) >= getattr(wanted, flag) for flag in FLAGS)
        return self.drafter == wanted.drafter and large and long and able

    @property
    def cost(self) -> tuple[int, ...]:
        """Order of buckets by time, as far as it is known without measuring."""
        return (self.draft, self.rows, self.seats, self.context, *(getattr(self, flag) for flag in FLAGS))


@dataclass(frozen=True, slots=True)
class Grid:
    """All buckets of an engine with these limits."""

    lanes: int  # sequences of a round, at most
    longest: int  # positions of a lane
    max_draft: int  # tokens of a seat's draft
    max_drafted: int  # drafted tokens of a round, summed over seats

    def seats(self, count: int) -> int:
        """Round a number of sequences up to that of a bucket: two sizes per power of two."""
        power = 1 << (count - 1).bit_length()
        three_quarters = power * 3 // 4
        return min(three_quarters if power >= 4 and count <= three_quarters else power, self.lanes)

    def draft(self, length: int, *, finds_fewer: bool) -> int:
        """Return the draft length of the bucket for drafts of at most `length` tokens."""
        if length and finds_fewer:
            return next((known for known in LOOKUPS if length <= known <= self.max_draft), self.max_draft)
        return max(known for known in DRAFTS if known <= length)

    def rows(self, seats: int, draft: int, wanted: int) -> int:
        """Round the rows of a verification up, but not beyond what `seats` can draft."""
        if not draft:
            return seats
        rows = max(CHEAP_ROWS, -(-(seats + wanted) // CHEAP_ROWS) * CHEAP_ROWS)
        return min(rows, seats + min(seats * draft, max(self.max_drafted, wanted)))

    def context(self, context: int) -> int:
        """Round a context up to LEAST_CONTEXT times a power of four, or to the lanes' own length."""
        bound = LEAST_CONTEXT
        while bound < context:
            bound *= 4
        return min(bound, self.longest)

    def start(self, drafters: Mapping[str, tuple[int, bool]]) -> Iterator[Bucket]:
        """Yield the buckets that traffic will need, the most useful first.

        The first ones serve any step of plain decoding, the next ones any step of each drafter; all later ones make
        some steps cheaper. `drafters`: by name, the longest draft, and whether it may find fewer tokens."""
        plain = self._buckets(None, 0)
        drafting = [
            bucket
            for name, (longest, finds_fewer) in drafters.items()
            for draft in self._drafts(longest, finds_fewer)
            for bucket in self._buckets(name, draft)
        ]
        fewer = [
            replace(bucket, rows=rows)
            for bucket in drafting
            for rows in range(CHEAP_ROWS, bucket.rows, CHEAP_ROWS)
            if rows > bucket.seats
        ]
        general, *others = self._variants()
        for buckets, variants in ((plain, [general]), (drafting, [general]), (plain, others), (drafting, others)):
            yield from (replace(bucket, **variant) for variant in variants for bucket in buckets)
        yield from (replace(bucket, **variant) for variant in [*others, general] for bucket in fewer)

    def samples(self, drafters: Mapping[str, tuple[int, bool]]) -> Iterator[Bucket]:
        """Yield a few buckets that together need nearly every kernel: they differ in the tiles of their products."""
        lengths = {name: self._drafts(*known) for name, known in drafters.items()}
        kinds = [(None, 0), *((name, draft) for name, all_ in lengths.items() for draft in {all_[0], all_[-1]})]
        for drafter, draft in kinds:
            by_tiles = {
                min(bucket.rows, 2 * CHEAP_ROWS).bit_length(): bucket for bucket in self._buckets(drafter, draft)
            }
            yield from by_tiles.values()

    def _buckets(self, drafter: str | None, draft: int) -> list[Bucket]:
        """List the buckets with the most rows, large batches first: they serve smaller ones."""
        counts = sorted({self.seats(count) for count in range(1, self.lanes + 1)}, reverse=True)
        return [
            Bucket(
                seats=seats,
                rows=self.rows(seats, draft, min(seats * draft, self.max_drafted)),
                draft=draft,
                drafter=drafter,
                context=self.longest,
                filters=True,
            )
            for seats in counts
        ]

    def _drafts(self, longest: int, finds_fewer: bool) -> list[int]:
        lengths = {self.draft(length, finds_fewer=finds_fewer) for length in range(1, longest + 1)}
        return sorted(lengths, reverse=True)

    def _variants(self) -> list[dict[str, Any]]:
        """List contexts and flags: first those that serve every other, then short contexts without any flag."""
        bounds = sorted({self.context(context) for context in (LEAST_CONTEXT * 4**i for i in range(16))})
        bounds = [bound for bound in bounds if bound <= START_CONTEXT or bound == self.longest]
        each = [{"context": bound, **dict.fromkeys(FLAGS, able)} for bound in bounds for able in (False, True)]
        return [each[-1], *each[:-1]]
