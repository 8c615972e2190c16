"""The pool of pages against a simple model of it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.kv.pages import PageMarks, PagePool

PAGES = 6


class PoolMachine(RuleBasedStateMachine):
    """The model: who holds what, and which names may still be found."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES)
        self.held: list[list[int]] = []
        self.names: dict[bytes, int] = {}
        self.idle: list[int] = []  # named pages that nobody holds, in the order they were left

    @property
    def counts(self) -> Counter[int]:
        return Counter(page for pages in self.held for page in pages)

    @rule(count=st.integers(1, 4))
    def take(self, count: int) -> None:
        free = PAGES - len(self.counts)
        assert self.pool.can_take(count) == (count <= free)
        if count > free:
            return
        epochs = list(self.pool.epochs)
        taken = self.pool.take(count)
        assert len(set(taken)) == count
        assert not set(taken) & self.counts.keys(), "a page that somebody holds"
        assert all(self.pool.epochs[page] > epochs[page] for page in taken)
        evicted = max(count - (free - len(self.idle)), 0)
        assert set(taken) & set(self.idle) == set(self.idle[:evicted]), "the page left longest ago goes first"
        self.names = {name: page for name, page in self.names.items() if page not in taken}
        self.idle = [page for page in self.idle if page not in taken]
        self.held.append(taken)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100))
    def give_back(self, which: int) -> None:
        pages = self.held.pop(which % len(self.held))
        self.pool.give_back(pages)
        self.idle += [page for page in pages if page in self.names.values() and not self.counts[page]]

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100), name=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def remember(self, which: int, name: bytes) -> None:
        page = self.held[which % len(self.held)][0]
        self.pool.remember(page, name)
        if page not in self.names.values():  # the latest page has the name
            self.idle = [other for other in self.idle if other != self.names.get(name)]
            self.names[name] = page

    @rule(name=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def find_and_share(self, name: bytes) -> None:
        page = self.pool.find(name)
        assert page == self.names.get(name)
        if page is not None:
            epoch = self.pool.epochs[page]
            self.pool.share(page)
            assert self.pool.epochs[page] == epoch, "what is known of a page stays true when it is shared"
            self.held.append([page])
            self.idle = [other for other in self.idle if other != page]

    @invariant()
    def consistent(self) -> None:
        self.pool.check(self.held)
        assert self.pool.held == len(self.counts)
        assert self.pool.available == PAGES - len(self.counts)


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


def test_giving_back_twice_is_an_error() -> None:
    pool = PagePool(2)
    pages = pool.take(1)
    pool.give_back(pages)
    with pytest.raises(AssertionError, match="given back without being held"):
        pool.give_back(pages)


def test_check_sees_what_is_wrong() -> None:
    pool = PagePool(3)
    pages = pool.take(2)
    pool.check([pages])
    with pytest.raises(AssertionError, match="1 references and 2 holders"):
        pool.check([pages, pages[:1]])
    pool._free.append(pages[0])
    with pytest.raises(AssertionError, match="lost or used while free"):
        pool.check([pages])


def test_marks_are_gone_with_the_epoch_of_their_page() -> None:
    pool = PagePool(4)
    marks = PageMarks(pool)
    pages = pool.take(3)
    marks.add(pages[:2])
    assert [page in marks for page in pages] == [True, True, False]
    assert marks.leading(pages) == 2
    assert marks.leading([pages[2], pages[0]]) == 0
    assert marks.leading([pages[0], -1, pages[1]]) == 1
    pool.give_back(pages[:1])
    assert pool.take(1) == pages[:1]
    marks.discard(pages[1])
    assert [page in marks for page in pages] == [False, False, False]


def test_holders_are_counted() -> None:
    pool = PagePool(2)
    [page] = pool.take(1)
    pool.share(page)
    assert [pool.holders(page), pool.holders(1 - page)] == [2, 0]
