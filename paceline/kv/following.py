"""Followers: how far a drafter that reads text has read each sequence.

A drafter with keys and values of its own keeps them under the target's page ids. It must read every committed token
before it can draft, and it need not read a page twice: a page that the prefix cache shares between sequences holds the
drafter's keys and values for all of them.

    committed   0 ................................. length-1 │
    read        0 ............ known-1                       │      missing(length) = [known, length)
    whole pages ├─ page 0 ─┤├─ page 1 ─┤                            marked in the `Reader`, for every sequence

A `Reader` belongs to one drafter and remembers the whole pages that it has read. A `Follower` belongs to one sequence
of that drafter, from start to stop. One invariant holds between calls: positions [0, known) have been read, and every
whole page among them is marked. A mark ends with the epoch of its page (`kv.pages`), so a page that was evicted and
taken again counts as unread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.kernels.base import PAGE_SIZE
from paceline.kv.pages import PageMarks, PagePool

Pages = Callable[[int, int], Sequence[int]]
"""(first, stop) → ids of pages `first` … `stop` - 1 of one sequence. Pages that it lacks are left out, or are -1."""


class Reader:
    """The whole pages that one drafter has read, of all sequences."""

    def __init__(self, pool: PagePool) -> None:
        self._marks = PageMarks(pool)

    def __contains__(self, page: int) -> bool:
        return page in self._marks

    def start(self, pages: Pages, length: int) -> Follower:
        """Follow a sequence, from the end of its leading pages that were read before.

        Only whole pages within the first `length` positions count."""
        follower = Follower(self._marks, pages)
        follower.skip(length)
        return follower


class OnTargetsMemory:
    """Implements a Reader, and the Follower of every sequence, for a drafter on the target's own KV memory: the target
    has computed every committed token but the last one."""

    def start(self, pages: Pages, length: int) -> OnTargetsMemory:
        return self

    def missing(self, length: int) -> range:
        return range(length - 1, length)

    def reach(self, position: int) -> Sequence[int]:
        return ()


class Follower:
    """How far one drafter has read one sequence."""

    __slots__ = ("_marks", "_pages", "known")

    def __init__(self, marks: PageMarks, pages: Pages) -> None:
        self.known = 0  # positions [0, known) have been read
        self._marks = marks
        self._pages = pages

    def missing(self, length: int) -> range:
        """Return those of the first `length` positions that have not been read."""
        return range(self.known, max(length, self.known))

    def reach(self, position: int) -> Sequence[int]:
        """Note that everything before `position` has been read; return the pages that this completes.

        May also be called before the reading is done, if it is certain to end before the sequence is read further. A
        position that was reached before changes nothing."""
        first, whole = self.known // PAGE_SIZE, position // PAGE_SIZE
        self.known = max(self.known, position)
        if whole <= first:
            return ()
        pages = self._pages(first, whole)
        self._marks.add(pages)
        return pages

    def skip(self, length: int) -> None:
        """Skip whole pages within the first `length` positions that have been read for another sequence meanwhile."""
        first, whole = self.known // PAGE_SIZE, length // PAGE_SIZE
        if whole > first and (skipped := self._marks.leading(self._pages(first, whole))):
            self.known = (first + skipped) * PAGE_SIZE
