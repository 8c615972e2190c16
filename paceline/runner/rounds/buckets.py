"""The shapes in which rounds are recorded as graphs: a grid that is coarse where size costs little time.

A bucket fits any step that is no larger in any respect. Its seats are padded with the dummy lane and its rows with
padding, and tokens drafted beyond a seat's limit are not verified. Each dimension of the grid is as coarse as time
allows (H200):

    seats     two sizes per power of two: a padded seat has one position, and costs attention nearly nothing
    rows      16, 32, 64 as tiles of products have, then multiples of 64
    draft     every pass of a drafting model costs, so the lengths are fine
    context   powers of four: programs of attention beyond a sequence's end stop at once
    scores    the usual numbers of alternatives; seats that do not ask for scores cost nothing

Lookups, copies and offers of the host have no passes, and find fewer tokens than they may: their lengths are coarse,
their rows powers of two. Seats that edit, score or draw with masks are few, and others cost such a round nearly
nothing: one kind of round can do all of it, and only its seats are powers of two.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from paceline.rules import BUILT_IN, Rule

LEAST_CONTEXT = 512  # positions: smallest context bound of a bucket
START_CONTEXT = 8192  # positions: larger bounds are recorded at the start only if they are the largest
DRAFTS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)  # draft lengths of buckets; others are cut to these
LOOKUPS = (4, 16)  # draft lengths of offers, of copies, and of drafters that find fewer tokens; others are rounded up
TILES = (16, 32, 64)  # rows of a tile of products; within one, another row is nearly free
TOPS = (0, 5, 20)  # alternatives of scored tokens; others are rounded up, beyond the last to powers of two
ABILITIES = ("edits", "scores", "offers", "copies")  # fields of a bucket that are larger for a round that can do more


@dataclass(frozen=True, slots=True)
class Bucket:
    """Everything that fixes the shape of a round."""

    seats: int  # padded number of sequences
    rows: int  # rows of the verification, summed over seats; at most seats × (1 + longest)
    draft: int  # passes of the drafter; 0: plain decoding, or only offers and copies
    drafter: str | None
    context: int  # positions; no sequence is longer, and attention is divided for this length
    offers: int = 0  # tokens that a seat can take from an offer, at most; 0: the host offers nothing
    copies: int = 0  # tokens of a portfolio's copy, at most; 0: it does not look, or the drafter is no portfolio
    edits: bool = False  # True: a lane edits logits by more than a mask
    scores: int = 0  # 1 + alternatives of scored tokens; 0: no lane asks for log-probabilities
    rules: tuple[Rule, ...] = ()  # rules beside the coupled one that judge drafts
    judged: int = 0  # padded number of seats with such rules
    tapped: bool = False  # True: hidden states at the target's taps go to the host
    masks: bool = False  # True: tokens are drawn once the host has sent masks

    @property
    def longest(self) -> int:
        """Tokens of the longest draft of a seat."""
        return max(self.draft, self.offers, self.copies)

    @property
    def runs_drafter(self) -> bool:
        """True: its drafter drafts, with its passes or by copies alone."""
        return self.draft > 0 or self.copies > 0

    @property
    def eager(self) -> bool:
        """True: a rule of another package judges drafts on the host, so that the round cannot be captured."""
        return any(rule not in BUILT_IN for rule in self.rules)

    def serves(self, wanted: Bucket) -> bool:
        """Return True if a round of this bucket can run a step of the bucket `wanted`."""
        large = self.seats >= wanted.seats and self.rows >= wanted.rows
        long = self.draft >= wanted.draft and self.context >= wanted.context
        able = all(getattr(self, name) >= getattr(wanted, name) for name in ABILITIES)
        return self._alike(wanted) and large and long and able

    def _alike(self, wanted: Bucket) -> bool:
        """Return True unless a step would pay for drafts of a kind that it does not want."""
        drafts = bool(self.draft) == bool(wanted.draft) and bool(self.longest) == bool(wanted.longest)
        judging = self.rules == wanted.rules and self.judged >= wanted.judged
        sent = self.tapped == wanted.tapped and self.masks == wanted.masks
        return self.drafter == wanted.drafter and sent and drafts and judging

    @property
    def shape(self) -> tuple[int, ...]:
        """The part that fixes the time of a round nearly alone; smaller shapes are faster."""
        return self.draft, self.rows, self.seats, self.context, self.longest

    @property
    def cost(self) -> tuple[int, ...]:
        """Order of buckets by time, as far as it is known without measuring."""
        return (*self.shape, *(getattr(self, name) for name in ABILITIES))


@dataclass(frozen=True, slots=True)
class Drafts:
    """The drafts of one drafter."""

    longest: int  # tokens
    finds_fewer: bool  # see DeviceDrafter
    plain: bool = False  # True: plain rounds of its sequences are its own, because it reads along
    whole: bool = False  # True: rounds draft for the longest draft alone, see `traits.passed_length`
    seats: tuple[int, ...] = ()  # sizes of rounds that have such drafts, see `Grid.sizes`; none: all
    copies: int = 0  # tokens of its longest copy; 0: it makes none
    copies_alone: bool = False  # True: rounds may copy without its network


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

    def sizes(self) -> list[int]:
        """List the numbers of seats of buckets, the largest first: rounds of large batches serve smaller ones."""
        return sorted({self.seats(count) for count in range(1, self.lanes + 1)}, reverse=True)

    def draft(self, length: int, *, finds_fewer: bool) -> int:
        """Return the draft length of the bucket for drafts of at most `length` tokens."""
        if length and finds_fewer:
            return next((known for known in LOOKUPS if length <= known <= self.max_draft), self.max_draft)
        return DRAFTS[bisect_right(DRAFTS, length) - 1]

    def rows(self, seats: int, longest: int, wanted: int, *, finds_fewer: bool) -> int:
        """Round the rows of a verification up, but not beyond what `seats` can draft, each `longest` tokens."""
        if not longest:
            return seats
        rows = seats + wanted
        power = max(TILES[0], 1 << (rows - 1).bit_length())
        rounded = power if finds_fewer or rows <= TILES[-1] else -(-rows // TILES[-1]) * TILES[-1]
        return min(rounded, seats + min(seats * longest, max(self.max_drafted, wanted)))

    def context(self, context: int) -> int:
        """Round a context up to LEAST_CONTEXT times a power of four, or to the lanes' own length if that is near."""
        bound = LEAST_CONTEXT
        while bound < context:
            bound *= 4
        return bound if 2 * bound <= self.longest else self.longest

    def scores(self, top: int | None) -> int:
        """Return the `scores` of a bucket whose lanes ask for at most `top` alternatives; None: no scores."""
        if top is None:
            return 0
        return 1 + next((known for known in TOPS if top <= known), 1 << (top - 1).bit_length())

    def start(self, drafters: Collection[tuple[str, Drafts]], *, offers: int = 0, scores: int = 0) -> Iterator[Bucket]:
        """Yield the buckets that traffic will need, the most useful first. `offers`: tokens of the host's drafts;
        `scores`: of rounds that edit, score and draw with masks, 0 if there is no memory for them.

        The first ones serve any step of plain decoding, the next ones any step of each drafter, then any of these with
        sampling parameters and grammars; all later ones make some steps cheaper. Rules beside the coupled one are not
        among them: their first rounds run eagerly."""
        plain = self._buckets(None)
        plain += [
            bucket for name, drafts in drafters if drafts.plain for bucket in self._buckets(name, seats=drafts.seats)
        ]
        whole = [
            (bucket, drafts.finds_fewer and not drafts.copies)
            for name, drafts in drafters
            for draft in self._passes(drafts)
            for bucket in self._buckets(name, draft=draft, seats=drafts.seats, copies=self._longest_copy(drafts))
        ]
        lengths = self._lengths(Drafts(offers, finds_fewer=True))
        whole += [(bucket, True) for length in lengths for bucket in self._buckets(None, offers=length)]
        drafting = [
            each for bucket, fewer in whole for each in (self._all_rows(bucket) if fewer else self._main(bucket))
        ]
        partial = [
            each
            for bucket, fewer in whole
            if not fewer
            for each in self._all_rows(bucket, finds_fewer=False)
            if each not in self._main(bucket)
        ]
        able = self._able([*plain, *drafting], scores) if scores else []
        beside, alone = self._offering(able)
        masked = [replace(bucket, masks=True) for bucket in able if not bucket.longest]
        masked += [replace(bucket, masks=True, offers=self._longest_offer()) for bucket in able if bucket.runs_drafter]
        rest = [replace(bucket, masks=masks) for masks in (False, True) for bucket in (*beside, *alone)]
        largest, *others = self.contexts()
        general = [(buckets, [largest]) for buckets in (plain, drafting, able, masked)]
        later = [(plain, others), (drafting, others), (rest, [largest]), (partial, [*others, largest])]
        yield from dict.fromkeys(
            replace(bucket, context=context)
            for buckets, contexts in (*general, *later)
            for context in contexts
            for bucket in buckets
        )

    def needed(self, buckets: Sequence[Bucket]) -> int:
        """Count the first ones of the start's buckets: those that serve every step, with the largest context."""
        largest = self.contexts()[0]
        return next((i for i, bucket in enumerate(buckets) if bucket.context != largest), len(buckets))

    def samples(self, drafters: Collection[tuple[str, Drafts]]) -> Iterator[Bucket]:
        """Yield buckets that together need every kernel of the grid's: drafts of all lengths with the largest context,
        and the longest ones, beside offers, with every context: by it, and by the seats, attention is divided. One
        seat with a rule of its own needs the kernels of all rules."""
        offers = (0, *self._lengths(Drafts(self.max_draft, finds_fewer=True)))
        nobody = [(None, Drafts(0, finds_fewer=True), 0, offered) for offered in offers[1:]]
        drafting = [(name, drafts, draft, 0) for name, drafts in drafters for draft in self._passes(drafts)]
        for drafter, drafts, draft, offered in (*drafting, *nobody):
            one = self._sampled(drafter, drafts, draft, offered)[-1]
            yield replace(one, rules=(Rule.THRESHOLD,), judged=1)
        for name, drafts in drafters:
            for draft in self._passes(drafts)[1:]:
                yield from self._sampled(name, drafts, draft)
            if drafts.plain:
                yield from self._buckets(name, seats=drafts.seats)
        longest: list[tuple[str | None, Drafts, int]] = [(None, Drafts(0, finds_fewer=True), 0)]
        longest += [(name, drafts, self._passes(drafts)[0]) for name, drafts in drafters]
        for (drafter, drafts, draft), offered, context in itertools.product(longest, offers, self.contexts()):
            buckets = self._sampled(drafter, drafts, draft, offered)
            yield from (replace(bucket, context=context) for bucket in buckets)

    def _sampled(self, drafter: str | None, drafts: Drafts, draft: int, offers: int = 0) -> list[Bucket]:
        copies = self._longest_copy(drafts)
        return self._buckets(drafter, draft=draft, offers=offers, seats=drafts.seats, copies=copies)

    def _main(self, bucket: Bucket) -> list[Bucket]:
        """List a bucket with the most rows; if it has room for copies, also with those of its network, or of short
        copies: texts that repeat are few, and the others pay for no rows of theirs."""
        if not bucket.copies:
            return [bucket]
        few = bucket.seats * max(bucket.draft, LOOKUPS[0])
        rows = self.rows(bucket.seats, bucket.longest, min(few, self.max_drafted), finds_fewer=False)
        return [bucket, replace(bucket, rows=rows)] if rows < bucket.rows else [bucket]

    def _all_rows(self, bucket: Bucket, *, finds_fewer: bool = True) -> list[Bucket]:
        """List a bucket with the most rows, then with fewer and fewer of them."""
        counts = {
            self.rows(bucket.seats, bucket.longest, wanted, finds_fewer=finds_fewer)
            for wanted in range(1, bucket.rows - bucket.seats + 1)
        }
        return [replace(bucket, rows=rows) for rows in sorted(counts, reverse=True)]

    def _buckets(
        self, drafter: str | None, *, draft: int = 0, offers: int = 0, seats: Sequence[int] = (), copies: int = 0
    ) -> list[Bucket]:
        """List the buckets with the most rows, large batches first. `seats`: their sizes; none: all."""
        return [
            Bucket(
                seats=count,
                rows=self._most_rows(count, max(draft, offers, copies)),
                draft=draft,
                drafter=drafter,
                context=self.longest,
                offers=offers,
                copies=copies,
            )
            for count in seats or self.sizes()
        ]

    def _able(self, buckets: Sequence[Bucket], scores: int) -> list[Bucket]:
        """List those of the buckets whose seats are a power of two, with edits and scores."""
        sizes = {1 << power for power in range(self.lanes.bit_length())} | {self.lanes}
        return [replace(bucket, edits=True, scores=scores) for bucket in buckets if bucket.seats in sizes]

    def _offering(self, able: Sequence[Bucket]) -> tuple[list[Bucket], list[Bucket]]:
        """List the buckets that draft with offers of the host beside their drafts, and the plain ones with offers
        alone: predicted tokens, and those that a grammar forces."""
        offers = self._longest_offer()
        most = {bucket: self._most_rows(bucket.seats, offers) for bucket in able}
        alone = [replace(bucket, rows=rows, offers=offers) for bucket, rows in most.items() if not bucket.runs_drafter]
        beside = [
            replace(bucket, rows=rows, offers=offers)
            for bucket in able
            if bucket.runs_drafter
            for rows in (most[bucket], self.rows(bucket.seats, offers, bucket.rows - bucket.seats, finds_fewer=True))
        ]
        return beside, [each for bucket in alone for each in self._all_rows(bucket)]

    def _longest_offer(self) -> int:
        return self.draft(self.max_draft, finds_fewer=True)

    def _longest_copy(self, drafts: Drafts) -> int:
        return self.draft(min(drafts.copies, self.max_draft), finds_fewer=True)

    def _passes(self, drafts: Drafts) -> list[int]:
        """List the numbers of passes of rounds that draft, the most first."""
        return [*self._lengths(drafts), *([0] if drafts.copies_alone else [])]

    def _lengths(self, drafts: Drafts) -> list[int]:
        shortest = drafts.longest if drafts.whole else 1
        lengths = {self.draft(length, finds_fewer=drafts.finds_fewer) for length in range(shortest, drafts.longest + 1)}
        return sorted(lengths, reverse=True)

    def _most_rows(self, seats: int, longest: int) -> int:
        return seats + min(seats * longest, self.max_drafted)

    def contexts(self) -> list[int]:
        """List the bounds of contexts: the largest, which serves every other, then the shortest first."""
        bounds = sorted({self.context(context) for context in (LEAST_CONTEXT * 4**i for i in range(16))})
        return [bounds[-1], *(bound for bound in bounds[:-1] if bound <= START_CONTEXT)]


def judged_count(count: int) -> int:
    """Round a number of seats with rules of their own up to a power of two."""
    return 1 << (count - 1).bit_length() if count else 0
