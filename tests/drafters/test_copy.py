"""A copy where there is one, else what the drafter inside computes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from paceline.draft import Draft
from paceline.drafters.base import Ask, FeatureDrafter, Seen
from paceline.drafters.copy import FIRST_COPY_TOKENS, CopyDrafter
from paceline.sampling.sampler import Sampler
from paceline.types import SamplingParams

SAMPLER = Sampler(SamplingParams(), seed=0, vocab_size=10, eos_ids=())
LOOP = [1, 2, 3, 4, 5] * 4


class Inner(FeatureDrafter):
    name, taps, max_draft = "inner", (3,), 4

    def __init__(self) -> None:
        self.asked: list[Ask] = []
        self.told: list[tuple[str, int]] = []

    def start(self, key: int, lane: int, tokens: np.ndarray) -> None:
        self.told.append(("start", key))

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        self.asked += asks
        return [Draft(tokens=(9,) * ask.max_draft) for ask in asks]

    def observe(self, key: int, tokens: np.ndarray, accepted: int) -> None:
        self.told.append(("observe", accepted))

    def stop(self, key: int) -> None:
        self.told.append(("stop", key))

    def feed(self, features: torch.Tensor, seen: Sequence[Seen], *, crowded: bool) -> dict[int, str]:
        self.told.append(("feed", len(seen)))
        return {}

    def knows(self, page: int) -> bool:
        return page == 7


def ask(tokens: list[int], *, key: int = 0, longest: int = 16) -> Ask:
    return Ask(key=key, lane=0, tokens=np.array(tokens, dtype=np.int32), max_draft=longest, sampler=SAMPLER)


@pytest.fixture
def inner() -> Inner:
    return Inner()


@pytest.fixture
def drafter(inner: Inner) -> CopyDrafter:
    drafter = CopyDrafter(inner, after=3, longest=12)
    for key in (0, 1):
        drafter.start(key, 0, np.array([1], dtype=np.int32))
    return drafter


def test_copies_where_it_can_and_computes_where_not(drafter: CopyDrafter, inner: Inner) -> None:
    copied, computed = drafter.propose([ask(LOOP), ask([1, 2, 3, 4], key=1)])
    assert copied.tokens == tuple((LOOP * 2)[:FIRST_COPY_TOKENS])
    assert computed.tokens == (9,) * 4
    assert (copied.passes, computed.passes) == (0, None)  # a copy says nothing of the cost of a pass
    assert [(one.key, one.max_draft) for one in inner.asked] == [(1, 4)]


def test_a_limit_holds_for_both(drafter: CopyDrafter) -> None:
    assert [len(draft) for draft in drafter.propose([ask(LOOP, longest=2), ask([1, 2], key=1, longest=3)])] == [2, 3]


@pytest.mark.parametrize(("accepted", "then"), [(FIRST_COPY_TOKENS, 12), (5, 7), (4, 6)])
def test_copies_are_as_long_as_the_last_ones_were_right(drafter: CopyDrafter, accepted: int, then: int) -> None:
    drafter.propose([ask(LOOP)])
    drafter.observe(0, np.array(LOOP), accepted)
    assert len(drafter.propose([ask(LOOP)])[0]) == then


def test_after_copies_that_were_wrong_the_next_one_waits(drafter: CopyDrafter, inner: Inner) -> None:
    waited = []
    for accepted in (0, 1, 0, 2, 0):
        before = len(inner.asked)
        while drafter.propose([ask(LOOP)])[0].tokens[0] == 9:
            pass
        waited.append(len(inner.asked) - before)
        drafter.observe(0, np.array(LOOP), accepted)
    assert waited == [0, 1, 0, 1, 0]  # the second and fourth copies were of two tokens, and half of them right


def test_the_inner_one_hears_of_its_own_drafts_alone(drafter: CopyDrafter, inner: Inner) -> None:
    drafter.propose([ask(LOOP), ask([1, 2], key=1)])
    inner.told.clear()
    drafter.observe(0, np.array(LOOP), 5)
    drafter.observe(1, np.array([1, 2]), 2)
    assert inner.told == [("observe", 2)]


def test_all_else_is_the_inner_ones(drafter: CopyDrafter, inner: Inner) -> None:
    inner.told.clear()
    drafter.feed(torch.zeros(1, 4), [Seen(0, 0, [0])], crowded=False)
    drafter.stop(1)
    assert inner.told == [("feed", 1), ("stop", 1)]
    assert (drafter.knows(7), drafter.knows(6)) == (True, False)
    assert (drafter.name, drafter.taps, drafter.max_draft) == ("inner", (3,), 12)
