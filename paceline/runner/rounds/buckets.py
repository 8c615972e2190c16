"""The shapes in which rounds are captured, and the choice of one for a step.

A captured round fits any step that is no larger in any respect: its seats are padded with the dummy lane, its rows with
padding, and tokens drafted beyond a seat's limit are not verified. While another captured shape fits without costing
much more, a new shape is captured only after it has been wanted often: batches shrink by one sequence at a time, and a
capture takes as long as several steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

LEAST_CONTEXT = 512  # positions: smallest context bound of a bucket
DRAFTS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)  # draft lengths that have graphs; others are cut to these
OFFERS = (4, 8, 16)  # longest drafts of the host that have graphs; shorter ones run in these
CHEAP_ROWS = 64  # rows up to which one more is nearly free: the time of a product is that of reading its matrix
PATIENCE = 32  # steps that run in a larger captured shape before the wanted shape is captured


@dataclass(frozen=True, slots=True)
class Bucket:
    """Everything that fixes the shape of a round."""

    seats: int  # padded number of sequences
    rows: int  # rows of the verification, summed over seats; at most seats × (1 + draft)
    draft: int  # passes of the drafter; 0: plain decoding
    drafter: str | None
    context: int  # positions; no sequence is longer, and attention is divided for this length
    filters: bool  # True: a lane asks for top-k, top-p or min-p
    offers: int = 0  # tokens that a seat can take from an offer, at most; 0: the host offers nothing
    edits: bool = False  # True: a lane edits logits; then `filters` is True as well

    @property
    def longest(self) -> int:
        """Tokens of the longest draft of a seat."""
        return max(self.draft, self.offers)

    def serves(self, wanted: Bucket) -> bool:
        """Return True if this bucket can run a step of the bucket `wanted` and costs little more."""
        sampling = self.filters >= wanted.filters and self.edits >= wanted.edits
        same = self.drafter == wanted.drafter and sampling and self.draft >= wanted.draft
        same = same and bool(self.draft) == bool(wanted.draft)  # a plain step never pays for draft passes
        same = same and (self.offers >= wanted.offers > 0 or self.offers == wanted.offers)
        large = self.seats >= wanted.seats and self.rows >= wanted.rows and self.context >= wanted.context
        cheap = self.rows <= max(CHEAP_ROWS, wanted.rows * 5 // 4) and self.context <= 4 * wanted.context
        return same and large and cheap


class Choice:
    """Chooses the captured bucket of a step."""

    def __init__(self) -> None:
        self._wanted: Counter[Bucket] = Counter()

    def choose(self, wanted: Bucket, captured: Collection[Bucket]) -> Bucket:
        """Return `wanted` itself if it is captured, was wanted often, or no other serves it; else the smallest that
        serves it."""
        if wanted in captured:
            return wanted
        self._wanted[wanted] += 1
        serving = [bucket for bucket in captured if bucket.serves(wanted)]
        if not serving or self._wanted[wanted] > PATIENCE:
            del self._wanted[wanted]
            return wanted
        return min(serving, key=lambda bucket: (bucket.rows, bucket.seats, bucket.context))


def draft_length(length: int) -> int:
    """Return the longest draft length that has a graph and is at most `length`."""
    return max(known for known in DRAFTS if known <= length)


def offer_length(length: int, *, most: int) -> int:
    """Round the longest draft of the host up to one that has a graph, to `most` at most; 0 stays 0."""
    return min(next((known for known in OFFERS if known >= length), most), most) if length else 0


def seat_count(count: int) -> int:
    """Round a number of sequences up to that of a bucket: all numbers up to 8, then four per power of two."""
    step = max(1, (1 << (count - 1).bit_length()) // 8) if count > 8 else 1
    return -(-count // step) * step


def draft_rows(wanted: int, *, most: int) -> int:
    """Round a number of drafted tokens up in steps that keep the buckets few, to `most` at most."""
    step = max(4, (1 << max(wanted - 1, 0).bit_length()) // 4)
    return min(-(-wanted // step) * step, most)


def context_bound(context: int, *, most: int) -> int:
    """Round a context up to a power of two between LEAST_CONTEXT and `most`."""
    return min(max(LEAST_CONTEXT, 1 << (context - 1).bit_length()), most)
