"""Followers of a drafter against a brute force that remembers the text of every page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.kernels.base import PAGE_SIZE
from paceline.kv.following import Follower, Reader
from paceline.kv.pages import PagePool

PAGES = 8
TEXTS = (b"a", b"ab", b"abc", b"b", b"bc")  # one letter a page: sequences with a common beginning


@dataclass
class Followed:
    follower: Follower
    pages: list[int]

    @property
    def length(self) -> int:
        return len(self.pages) * PAGE_SIZE


class FollowingMachine(RuleBasedStateMachine):
    """The model: the contents of each page as the drafter's memory has them, position by position."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES)
        self.reader = Reader(self.pool)
        self.memory: list[set[int]] = [set() for _ in range(PAGES)]  # offsets that were read since the page was taken
        self.whole: set[int] = set()  # pages that one sequence was known to the end of, since they were taken
        self.sequences: list[Followed] = []

    @rule(text=st.sampled_from(TEXTS), short=st.integers(0, 2 * PAGE_SIZE))
    def start(self, text: bytes, short: int) -> None:
        """A sequence that shares the known pages of its text and takes the others."""
        if not self.pool.can_take(len(text)):
            return
        pages: list[int] = []
        for end in range(1, len(text) + 1):
            page = self.pool.find(text[:end])
            if page is None:
                break
            self.pool.share(page)
            pages.append(page)
        for page in self.pool.take(len(text) - len(pages)):
            self.memory[page] = set()
            self.whole.discard(page)
            pages.append(page)
            self.pool.remember(page, text[: len(pages)])
        length = max(len(pages) * PAGE_SIZE - short, 0)
        follower = self.reader.start(lambda first, stop: pages[first:stop], length)
        assert follower.known == self.read_before(pages, 0, length)
        self.sequences.append(Followed(follower, pages))

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 100), count=st.integers(0, 3 * PAGE_SIZE))
    def read(self, which: int, count: int) -> None:
        one = self.sequences[which % len(self.sequences)]
        missing = one.follower.missing(one.length)
        assert list(missing) == list(range(one.follower.known, one.length))
        position = min(missing.start + count, one.length)
        before = one.follower.known // PAGE_SIZE
        for place in range(missing.start, position):
            self.memory[one.pages[place // PAGE_SIZE]].add(place % PAGE_SIZE)
        self.whole |= {*one.pages[before : position // PAGE_SIZE]}
        assert list(one.follower.reach(position)) == one.pages[before : position // PAGE_SIZE]
        assert one.follower.known == position

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 100), back=st.integers(0, 3 * PAGE_SIZE))
    def reach_again(self, which: int, back: int) -> None:
        """A position that was reached before changes nothing."""
        follower = self.sequences[which % len(self.sequences)].follower
        known = follower.known
        assert not follower.reach(max(known - back, 0))
        assert follower.known == known

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 100), short=st.integers(0, 2 * PAGE_SIZE))
    def skip(self, which: int, short: int) -> None:
        one = self.sequences[which % len(self.sequences)]
        known, length = one.follower.known, max(one.length - short, 0)
        one.follower.skip(length)
        assert one.follower.known == max(known, self.read_before(one.pages, known // PAGE_SIZE, length))

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 100))
    def stop(self, which: int) -> None:
        self.pool.give_back(reversed(self.sequences.pop(which % len(self.sequences)).pages))

    @invariant()
    def what_is_known_was_read(self) -> None:
        for page in range(PAGES):
            assert (page in self.reader) == (page in self.whole)
            assert page not in self.whole or len(self.memory[page]) == PAGE_SIZE
        for one in self.sequences:
            for place in range(one.follower.known):
                assert place % PAGE_SIZE in self.memory[one.pages[place // PAGE_SIZE]]
            assert all(page in self.reader for page in one.pages[: one.follower.known // PAGE_SIZE])

    def read_before(self, pages: Sequence[int], first: int, length: int) -> int:
        """The end of the whole pages, from page `first` on, that were read, within the first `length` positions."""
        page = first
        while page < length // PAGE_SIZE and pages[page] in self.whole:
            page += 1
        return page * PAGE_SIZE


TestFollowing = FollowingMachine.TestCase
TestFollowing.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.fixture
def pool() -> PagePool:
    return PagePool(4)


def follow(reader: Reader, pages: list[int]) -> Follower:
    return reader.start(lambda first, stop: pages[first:stop], len(pages) * PAGE_SIZE)


def test_a_page_counts_only_when_all_of_it_was_read(pool: PagePool) -> None:
    reader, pages = Reader(pool), pool.take(2)
    follower = follow(reader, pages)
    assert follower.reach(PAGE_SIZE - 1) == ()
    assert follow(reader, pages).known == 0
    assert list(follower.reach(PAGE_SIZE)) == pages[:1]
    assert follow(reader, pages).known == PAGE_SIZE


def test_a_page_that_is_taken_again_was_not_read(pool: PagePool) -> None:
    reader, pages = Reader(pool), pool.take(4)
    follow(reader, pages).reach(4 * PAGE_SIZE)
    assert all(page in reader for page in pages)
    pool.give_back(pages)
    again = pool.take(4)
    assert not any(page in reader for page in again)
    assert follow(reader, again).known == 0


def test_readers_do_not_share_what_they_read(pool: PagePool) -> None:
    one, other, pages = Reader(pool), Reader(pool), pool.take(1)
    follow(one, pages).reach(PAGE_SIZE)
    assert follow(one, pages).known == PAGE_SIZE
    assert follow(other, pages).known == 0


def test_a_table_without_pages_is_unread(pool: PagePool) -> None:
    reader = Reader(pool)
    assert reader.start(lambda first, stop: [-1] * (stop - first), 3 * PAGE_SIZE).known == 0


def test_what_another_sequence_read_meanwhile_is_skipped(pool: PagePool) -> None:
    reader, pages = Reader(pool), pool.take(3)
    behind, ahead = follow(reader, pages), follow(reader, pages)
    behind.reach(3)
    ahead.reach(2 * PAGE_SIZE + 1)
    behind.skip(3 * PAGE_SIZE)
    assert behind.known == 2 * PAGE_SIZE
    assert behind.missing(PAGE_SIZE) == range(2 * PAGE_SIZE, 2 * PAGE_SIZE), "nothing is missing of what is known"
