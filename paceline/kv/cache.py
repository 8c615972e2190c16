"""The KV cache of the engine: spans of pages that grow by reservation and become final only by commit.

A `Span` is one sequence's share:

    positions   0 ............ committed ............ reserved
                │ final, reusable │ written by a draft  │
                                    or not at all

`commit` makes the slots of an accepted path final and leaves the rest of the reservation as if never written. Full
pages of final slots are remembered under a digest of all tokens up to their end, so that a later request with the same
beginning (and the same salt) shares them. A rejected token is never part of a digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.kernels.base import PAGE_SIZE, KVMemory
from paceline.kv.pages import PagePool


@dataclass(slots=True, eq=False)
class Span:
    """The pages of one sequence, in order of position. `committed` slots are final."""

    salt: str
    pages: list[int] = field(default_factory=list)
    committed: int = 0
    digests: list[bytes] = field(default_factory=list)  # digests of the full, committed pages

    @property
    def reserved(self) -> int:
        return len(self.pages) * PAGE_SIZE


class KVCache:
    def __init__(self, memory: KVMemory, *, share_prefixes: bool = True) -> None:
        self.pool = PagePool(memory.num_pages)
        self._memory = memory
        self._share_prefixes = share_prefixes
        self._spans: dict[int, Span] = {}

    def open(
        self,
        tokens: np.ndarray,
        *,
        salt: str,
        reuse: int | None = None,
        wanted: Callable[[int], bool] = lambda page: True,
    ) -> Span:
        """Open a span for a sequence of these tokens. It starts with the pages of the longest known prefix.

        `reuse`: tokens that may come from other sequences; None: as many as possible. The prefix ends before the first
        page that is not `wanted`: it is computed again, and the new page replaces the old one. At least one token is
        left to compute, since logits need a row.
        """
        span = Span(salt=salt)
        most = len(tokens) - 1 if reuse is None else min(reuse, len(tokens) - 1)
        if self._share_prefixes:
            for digest in self._digests(span, tokens, most // PAGE_SIZE):
                page = self.pool.find(digest)
                if page is None or not wanted(page):
                    break
                self.pool.share(page)
                span.pages.append(page)
                span.digests.append(digest)
            span.committed = span.reserved
        self._spans[id(span)] = span
        return span

    def can_reserve(self, span: Span, slots: int) -> bool:
        return self.pool.can_take(self._missing(span, slots))

    def reserve(self, span: Span, slots: int) -> None:
        """Make positions 0 … slots-1 writable."""
        missing = self._missing(span, slots)
        if missing > 0:
            span.pages += self.pool.take(missing)

    def commit(self, span: Span, tokens: np.ndarray | memoryview, path: Sequence[int]) -> None:
        """Make the rows `path`, written at committed + path[i], final as positions committed, committed + 1, …

        `tokens` are all tokens of the sequence, at least up to the new end.
        """
        count = len(path)
        if count and path[-1] != count - 1:
            self._move(span, span.committed, path)
        self.extend(span, tokens, count)

    def extend(self, span: Span, tokens: np.ndarray | memoryview, count: int) -> None:
        """Make the next `count` rows final, which lie at their positions. `tokens`: see `commit`."""
        span.committed += count
        full, pages = span.committed // PAGE_SIZE, span.pages
        assert span.committed <= len(pages) * PAGE_SIZE, f"committed {span.committed} of {span.reserved} reserved slots"
        if self._share_prefixes and full > len(span.digests):
            for digest in self._digests(span, tokens, full):
                self.pool.remember(span.pages[len(span.digests)], digest)
                span.digests.append(digest)

    def close(self, span: Span) -> None:
        """Give every page back, last page first so that the beginning of a prefix is evicted last."""
        del self._spans[id(span)]
        self.pool.give_back(reversed(span.pages))
        span.pages = []

    def check(self) -> None:
        """Raise AssertionError if any page is lost, shared by mistake, or remembered before it is final."""
        self.pool.check(span.pages for span in self._spans.values())
        for span in self._spans.values():
            assert span.committed <= span.reserved, "committed more than was reserved"
            assert len(span.digests) <= span.committed // PAGE_SIZE, "a page is remembered before it is final"

    def slots(self, span: Span, start: int, stop: int) -> list[int]:
        return [span.pages[place // PAGE_SIZE] * PAGE_SIZE + place % PAGE_SIZE for place in range(start, stop)]

    def _missing(self, span: Span, slots: int) -> int:
        return -(-slots // PAGE_SIZE) - len(span.pages)

    def _move(self, span: Span, first: int, path: Sequence[int]) -> None:
        """Copy accepted rows to their final positions; leading rows that are already in place stay."""
        slots, fixed = self.slots(span, first, first + path[-1] + 1), 0
        while path[fixed] == fixed:
            fixed += 1
        self._memory.move([slots[row] for row in path[fixed:]], slots[fixed : len(path)])

    def _digests(self, span: Span, tokens: np.ndarray | memoryview, full: int) -> Iterator[bytes]:
        """Yield the digests of pages len(span.digests) … full-1, each over all tokens up to the page's end."""
        previous = span.digests[-1] if span.digests else hashlib.blake2b(span.salt.encode(), person=b"salt").digest()
        for page in range(len(span.digests), full):
            chunk = np.ascontiguousarray(tokens[page * PAGE_SIZE : (page + 1) * PAGE_SIZE], dtype=np.int32)
            previous = hashlib.blake2b(chunk.tobytes(), key=previous, digest_size=32).digest()
            yield previous
