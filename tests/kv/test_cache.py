"""The KV cache against a simple model of it: random sequences of open, reserve, commit and close.

The memory holds the token of each slot, so that a page that was shared, moved or evicted by mistake shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.kernels.base import PAGE_SIZE
from paceline.kv.cache import KVCache, Span
from tests.toy import ToyKV

SALTS = ("", "salt")


@dataclass
class Held:
    """A span and the tokens it should hold."""

    span: Span
    tokens: list[int] = field(default_factory=list)


class CacheMachine(RuleBasedStateMachine):
    """Few pages and two kinds of tokens: sharing, eviction and exhaustion all happen."""

    num_pages = 12

    def __init__(self) -> None:
        super().__init__()
        self.memory = ToyKV(self.num_pages)
        self.cache = KVCache(self.memory)
        self.held: list[Held] = []
        self.final: set[tuple[str, tuple[int, ...]]] = set()  # salt and all tokens up to the end of a full page

    @rule(blocks=st.lists(st.integers(0, 1), max_size=4), rest=st.integers(1, PAGE_SIZE), salt=st.sampled_from(SALTS))
    def open(self, blocks: list[int], rest: int, salt: str) -> None:
        tokens = [block for block in blocks for _ in range(PAGE_SIZE)] + [0] * rest
        span = self.cache.open(np.array(tokens), salt=salt)
        assert span.committed < len(tokens)
        assert span.committed % PAGE_SIZE == 0
        for end in range(PAGE_SIZE, span.committed + 1, PAGE_SIZE):
            assert (salt, tuple(tokens[:end])) in self.final, "a page that nobody made final"
        self.held.append(Held(span, tokens[: span.committed]))
        self._expect_most(span, tokens)

    def _expect_most(self, span: Span, tokens: list[int]) -> None:
        """Nothing more to say where pages may have been evicted."""

    @precondition(lambda self: self.held)
    @rule(
        which=st.integers(0, 100),
        count=st.integers(0, 2 * PAGE_SIZE),
        block=st.integers(0, 1),
        draft=st.lists(st.booleans(), max_size=9),
    )
    def grow(self, which: int, count: int, block: int, draft: list[bool]) -> None:
        """`count` tokens and then a draft of which some rows are accepted; the others hold another token."""
        held = self.held[which % len(self.held)]
        span, start = held.span, held.span.committed
        end = start + count + len(draft)
        if not self.cache.can_reserve(span, end):
            with pytest.raises(AssertionError):
                self.cache.reserve(span, end)
            return
        self.cache.reserve(span, end)
        rows = [block] * count + [block if alive else 7 for alive in draft]
        self.memory.tokens[self.cache.slots(span, start, end)] = rows
        path = [*range(count), *(count + node for node, alive in enumerate(draft) if alive)]
        held.tokens += [block] * len(path)
        self.cache.commit(span, np.array([*held.tokens, 9, 9]), path)
        assert span.committed == start + len(path)
        for full in range(PAGE_SIZE, span.committed + 1, PAGE_SIZE):
            self.final.add((span.salt, tuple(held.tokens[:full])))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100))
    def close(self, which: int) -> None:
        self.cache.close(self.held.pop(which % len(self.held)).span)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.cache.check()

    @invariant()
    def committed_slots_hold_their_tokens(self) -> None:
        for held in self.held:
            slots = self.cache.slots(held.span, 0, held.span.committed)
            assert self.memory.tokens[slots].tolist() == held.tokens

    def teardown(self) -> None:
        for held in self.held:
            self.cache.close(held.span)
        self.cache.check()
        assert self.cache.pool.available == self.num_pages


class RoomyMachine(CacheMachine):
    """Pages never run out: every prefix that was ever final is found again."""

    num_pages = 200

    def _expect_most(self, span: Span, tokens: list[int]) -> None:
        most = 0
        while (span.salt, tuple(tokens[: most + PAGE_SIZE])) in self.final and most + PAGE_SIZE < len(tokens):
            most += PAGE_SIZE
        assert span.committed == most


CacheMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
RoomyMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
TestCache = CacheMachine.TestCase
TestRoomyCache = RoomyMachine.TestCase


def filled(cache: KVCache, tokens: list[int], *, salt: str = "") -> Span:
    span = cache.open(np.array(tokens), salt=salt)
    cache.reserve(span, len(tokens))
    cache.commit(span, np.array(tokens), range(len(tokens) - span.committed))
    return span


def test_a_page_in_use_is_shared() -> None:
    cache = KVCache(ToyKV(8))
    tokens = [*range(40)]
    first = filled(cache, tokens)
    second = cache.open(np.array(tokens), salt="")
    assert second.pages == first.pages[:2]
    cache.check()


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"salt": "other"}, {}),
        ({"salt": "", "reuse": False}, {}),
        ({"salt": ""}, {"share_prefixes": False}),
    ],
)
def test_not_shared(changes: dict[str, object], options: dict[str, bool]) -> None:
    """Another salt, a request that must compute everything, a cache that was told not to."""
    cache = KVCache(ToyKV(8), **options)
    filled(cache, [*range(40)])
    assert cache.open(np.arange(40), **changes).committed == 0


def test_a_prefix_is_found_by_all_its_tokens() -> None:
    """The second page is the same, the first is not."""
    cache = KVCache(ToyKV(8))
    filled(cache, [*range(40)])
    assert cache.open(np.array([99, *range(1, 40)]), salt="").committed == 0
    assert cache.open(np.array([*range(16), 99, *range(17, 40)]), salt="").committed == 16


def test_at_least_one_token_is_left_to_compute() -> None:
    cache = KVCache(ToyKV(8))
    filled(cache, [*range(33)])
    for length, known in [(16, 0), (17, 16), (32, 16), (33, 32)]:
        span = cache.open(np.arange(length), salt="")
        assert span.committed == known
        cache.close(span)


def test_the_beginning_of_a_prefix_is_evicted_last() -> None:
    cache = KVCache(ToyKV(4))
    cache.close(filled(cache, [*range(50)]))
    other = cache.open(np.full(20, 7), salt="")
    cache.reserve(other, 32)
    assert cache.open(np.arange(50), salt="").committed == 32


def test_move_reads_before_it_writes() -> None:
    """A path whose rows overlap where they go."""
    memory = ToyKV(2)
    cache = KVCache(memory)
    span = cache.open(np.zeros(1), salt="")
    cache.reserve(span, 8)
    memory.tokens[cache.slots(span, 0, 8)] = range(8)
    cache.commit(span, np.arange(8), [0, 2, 3, 5, 7])
    assert memory.tokens[cache.slots(span, 0, 5)].tolist() == [0, 2, 3, 5, 7]
    assert memory.read(torch.tensor([0]))[0].shape == (1, 1, 1, 1)


def test_check_sees_what_is_wrong() -> None:
    """The integrity check can fail."""
    cache = KVCache(ToyKV(4))
    span = filled(cache, [*range(20)])
    cache.check()
    span.pages.append(cache.pool.take(1)[0])
    cache.check()
    lost = span.pages.pop()
    with pytest.raises(AssertionError, match="1 references and 0 holders"):
        cache.check()
    span.pages.append(lost)
    span.committed = 5
    with pytest.raises(AssertionError, match="remembered before it is final"):
        cache.check()
    span.committed = 100
    with pytest.raises(AssertionError, match="committed more than was reserved"):
        cache.check()
