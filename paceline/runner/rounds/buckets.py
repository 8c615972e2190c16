"""The shapes that rounds are captured in, and which of them a step takes.

A captured round fits any step that is no larger in any respect: its seats are padded with the dummy lane, its rows with
padding, and what is drafted beyond a seat's limit is not verified. So a new shape is captured only once it has been
wanted often, as long as another one fits without costing much more: batches shrink by one sequence at a time, and a
capture takes as long as several steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

LEAST_CONTEXT = 512
DRAFTS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)  # lengths that have graphs; others are cut
CHEAP_ROWS = 64  # up to here rows cost next to nothing
PATIENCE = 32  # steps in another shape before one of its own is captured


@dataclass(frozen=True, slots=True)
class Bucket:
    """Everything that fixes the shape of a round."""

    seats: int  # the batch, padded
    rows: int  # of the verification: the total, not seats × longest draft
    draft: int  # passes of the drafter; 0: plain decoding
    drafter: str | None
    context: int  # a bound that no sequence exceeds: how far attention is spread
    filters: bool  # some lane wants top-k, top-p or min-p

    def serves(self, wanted: Bucket) -> bool:
        """Whether it does what `wanted` would, and costs little more."""
        same = self.drafter == wanted.drafter and self.filters >= wanted.filters and self.draft >= wanted.draft
        large = self.seats >= wanted.seats and self.rows >= wanted.rows and self.context >= wanted.context
        cheap = self.rows <= max(CHEAP_ROWS, wanted.rows * 5 // 4) and self.context <= 4 * wanted.context
        return same and large and cheap


class Choice:
    """Which captured bucket a step takes."""

    def __init__(self) -> None:
        self._wanted: Counter[Bucket] = Counter()

    def choose(self, wanted: Bucket, captured: Collection[Bucket]) -> Bucket:
        """`wanted` itself if it is there, or has been wanted often, or nothing else serves."""
        if wanted in captured:
            return wanted
        self._wanted[wanted] += 1
        serving = [bucket for bucket in captured if bucket.serves(wanted)]
        if not serving or self._wanted[wanted] > PATIENCE:
            del self._wanted[wanted]
            return wanted
        return min(serving, key=lambda bucket: (bucket.rows, bucket.seats, bucket.context))


def draft_length(length: int) -> int:
    """The longest that has a graph and is not longer."""
    return max(known for known in DRAFTS if known <= length)


def seat_count(count: int) -> int:
    """The bucket for so many sequences: all numbers up to 8, then four to each power of two."""
    step = max(1, (1 << (count - 1).bit_length()) // 8) if count > 8 else 1
    return -(-count // step) * step


def draft_rows(wanted: int, *, most: int) -> int:
    """Room for so many drafted tokens, in steps that keep the buckets few."""
    step = max(4, (1 << max(wanted - 1, 0).bit_length()) // 4)
    return min(-(-wanted // step) * step, most)


def context_bound(context: int, *, most: int) -> int:
    return min(max(LEAST_CONTEXT, 1 << (context - 1).bit_length()), most)
