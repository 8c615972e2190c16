"""Pages of KV memory: how many holders each has, and which unused pages still hold a known prefix.

A page is in exactly one of three states:

    held      references > 0
    cached    no references, but its content is known under a digest: may be revived, or evicted
    free      no references, no content

`take` prefers free pages and then evicts the page that was cached longest ago. Every `take` starts a new epoch of the
page: a note about the page's content (`PageMarks`) is valid within its epoch only. Nothing here touches tensors.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from itertools import takewhile


class PagePool:
    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.epochs = [0] * num_pages
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._digest_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        return len(self._free) + len(self._cached)

    @property
    def held(self) -> int:
        return self.num_pages - self.available

    def can_take(self, count: int) -> bool:
        return count <= self.available

    def take(self, count: int) -> list[int]:
        assert self.can_take(count), f"{count} pages taken where {self.available} are available"
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
            self.epochs[page] += 1
        return pages

    def holders(self, page: int) -> int:
        return self._references[page]

    def find(self, digest: bytes) -> int | None:
        return self._page_of.get(digest)

    def share(self, page: int) -> None:
        """Add a holder of a page that is held or cached."""
        if self._references[page] == 0:
            del self._cached[page]
        self._references[page] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert self._references[page] > 0, f"page {page} given back without being held"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._retire(page)

    def remember(self, page: int, digest: bytes) -> None:
        """Note that the content of a held page is final and known as `digest`. If another page has the same content,
        the digest now maps to this page: content is computed again only if the other page could not be used."""
        if page in self._digest_of:
            return
        if digest in self._page_of:
            self._forget(self._page_of[digest])
        self._page_of[digest] = page
        self._digest_of[page] = digest

    def check(self, holdings: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless references, states and digests agree with what the holders say they hold."""
        counts = Counter(page for pages in holdings for page in pages)
        for page in range(self.num_pages):
            assert self._references[page] == counts[page], (
                f"page {page} has {self._references[page]} references and {counts[page]} holders"
            )
        free, cached = set(self._free), set(self._cached)
        unheld = {page for page in range(self.num_pages) if not self._references[page]}
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & cached, f"pages both free and cached: {free & cached}"
        assert free | cached == unheld, f"pages lost or used while free: {(free | cached) ^ unheld}"
        assert all(page in self._digest_of for page in cached), "a cached page without a digest"
        assert not free & self._digest_of.keys(), "a free page with a digest"
        assert {digest: page for page, digest in self._digest_of.items()} == self._page_of, "digests disagree"

    def _forget(self, page: int) -> None:
        del self._page_of[self._digest_of.pop(page)]
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)

    def _retire(self, page: int) -> None:
        if page in self._digest_of:
            self._cached[page] = None
        else:
            self._free.append(page)

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._page_of[self._digest_of.pop(page)]
        return page


class PageMarks:
    """A set of pages, each for as long as its epoch lasts: a page that is taken anew is no longer in the set."""

    def __init__(self, pool: PagePool) -> None:
        self._epochs = pool.epochs
        self._marked = [-1] * pool.num_pages  # the epoch in which the page was marked

    def __contains__(self, page: int) -> bool:
        return self._marked[page] == self._epochs[page]

    def add(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._marked[page] = self._epochs[page]

    def discard(self, page: int) -> None:
        self._marked[page] = -1

    def leading(self, pages: Iterable[int]) -> int:
        """Count the marked pages before the first one that is not marked; -1 stands for no page."""
        return sum(1 for _ in takewhile(lambda page: page >= 0 and page in self, pages))
