"""Prepared values are found by the Batch object they were made for, and by no other."""

from __future__ import annotations

import gc
from dataclasses import replace

import torch

from paceline.kernels.base import Batch
from paceline.runner.forwards.known_batches import MAX_CACHED_BATCHES, KnownBatches


def some_batch() -> Batch:
    zero = torch.zeros(1, dtype=torch.int32)
    return Batch(zero, zero, zero, torch.tensor([0, 1]), zero, zero.view(1, 1), zero)


def test_the_same_object_finds_what_was_prepared() -> None:
    known, batch = KnownBatches[str](), some_batch()
    assert known.get(batch) is None
    assert known.put(batch, "first") == "first"
    assert known.get(batch) == "first"
    assert known.put(batch, "second") == "second"
    assert known.get(batch) == "second"
    assert known.get(replace(batch)) is None


def test_a_later_object_never_gets_the_entry_of_an_earlier_one() -> None:
    """An id is free again once its object is gone, so an entry must keep its batch."""
    known = KnownBatches[int]()
    for turn in range(100):
        batch = some_batch()
        assert known.get(batch) is None, "a new batch was taken for an old one"
        known.put(batch, turn)
        del batch
        gc.collect(0)


def test_a_full_cache_is_emptied() -> None:
    known = KnownBatches[int]()
    batches = [some_batch() for _ in range(MAX_CACHED_BATCHES + 1)]
    for i, batch in enumerate(batches):
        known.put(batch, i)
    assert [known.get(batch) for batch in batches] == [None] * MAX_CACHED_BATCHES + [MAX_CACHED_BATCHES]


def test_nothing_is_left_after_clearing() -> None:
    known, batch = KnownBatches[int](), some_batch()
    known.put(batch, 1)
    known.clear()
    assert known.get(batch) is None
