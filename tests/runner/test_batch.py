"""The tensors of a pass, compared with a builder that goes row by row: tokens, slots, and what each row attends to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import hypothesis
import numpy as np
import torch
from hypothesis import strategies as st

from paceline.draft import EMPTY, Draft
from paceline.kernels.base import PAGE_SIZE, Batch
from paceline.runner.batch import Share, build_batch
from paceline.runner.lanes import Lanes
from tests.accept.by_hand import parents_of, random_chain, random_tree

VOCAB, CONTEXT = 50, 80


@dataclass(frozen=True)
class Row:
    token: int
    position: int
    slot: int
    attends: tuple[int, ...]  # slots in the order of positions, its own last


def rows_by_hand(lanes: Lanes, share: Share) -> list[Row]:
    def slot(place: int) -> int:
        return int(lanes.pages_np[share.lane, place // PAGE_SIZE]) * PAGE_SIZE + place % PAGE_SIZE

    tokens = lanes.tokens_np[share.lane]
    end = share.start + share.count
    rows = [
        Row(int(tokens[place]), place, slot(place), tuple(map(slot, range(place + 1))))
        for place in range(share.start, end)
    ]
    for node, parent in enumerate(parents_of(share.draft)):
        above = rows[share.count + parent] if parent >= 0 else rows[share.count - 1]
        place = end + node
        rows.append(Row(int(tokens[place]), above.position + 1, slot(place), (*above.attends, slot(place))))
    return rows


def rows_of(batch: Batch) -> list[Row]:
    """Read the rows of a batch as `Batch` defines them."""
    rows = []
    starts, tails = batch.row_starts.tolist(), None if batch.tails is None else batch.tails.tolist()
    tokens, positions, slots = (each.tolist() for each in (batch.tokens, batch.positions, batch.slots))
    for sequence, (base, pages) in enumerate(zip(batch.bases.tolist(), batch.page_table.tolist(), strict=True)):
        for row in range(starts[sequence], starts[sequence + 1]):
            below = positions[row] + 1 if tails is None else min(positions[row] + 1, base)
            attends = [pages[place // PAGE_SIZE] * PAGE_SIZE + place % PAGE_SIZE for place in range(below)]
            if tails is not None:
                attends += tails[row][: positions[row] + 1 - below]
            rows.append(Row(tokens[row], positions[row], slots[row], tuple(attends)))
    return rows


def make(seed: int, *, trees: bool) -> tuple[Lanes, list[Share]]:
    random = np.random.default_rng(seed)
    lanes = Lanes(count=5, max_context=CONTEXT, max_draft=8)
    lanes.tokens_np[:] = random.integers(VOCAB, size=lanes.tokens_np.shape)
    lanes.pages_np[:] = random.permutation(lanes.pages_np.size).reshape(lanes.pages_np.shape)
    shares = []
    for lane in random.permutation(5)[: int(random.integers(1, 6))].tolist():
        start, count = int(random.integers(0, CONTEXT - 20)), int(random.integers(1, 20))
        draft, kind = EMPTY, int(random.integers(3))
        if kind:
            length = int(random.integers(1, 9))
            draft = (random_tree if trees and kind == 2 else random_chain)(random, length, VOCAB)
            lanes.tokens_np[lane, start + count : start + count + length] = draft.tokens
        outs = int(random.integers(0 if not draft else 1, count + 1))
        shares.append(Share(lane=lane, start=start, count=count, draft=draft, outs=outs))
    return lanes, shares


def logit_rows_by_hand(shares: Sequence[Share]) -> list[int]:
    wanted, first = [], 0
    for share in shares:
        wanted += [first + row for row in range(share.rows) if row >= share.count - share.outs]
        first += share.rows
    return wanted


@hypothesis.given(st.integers(0, 2**32 - 1), st.booleans())
@hypothesis.settings(max_examples=60, deadline=None)
def test_as_by_hand(seed: int, trees: bool) -> None:
    lanes, shares = make(seed, trees=trees)
    batch = build_batch(lanes, shares)
    assert rows_of(batch) == [row for share in shares for row in rows_by_hand(lanes, share)]
    assert batch.logit_rows.tolist() == logit_rows_by_hand(shares)
    assert (batch.tails is None) == all(share.draft.is_chain for share in shares)
    for name in ("tokens", "positions", "slots", "row_starts", "bases", "page_table", "logit_rows", "tails"):
        tensor = getattr(batch, name)
        if tensor is not None:
            assert tensor.dtype == torch.int32
            assert tensor.is_contiguous()


def test_siblings_do_not_see_each_other() -> None:
    lanes = Lanes(count=1, max_context=20, max_draft=4)
    lanes.pages_np[0] = range(lanes.pages_np.shape[1])
    draft = Draft(tokens=(1, 2, 3), parents=(-1, -1, 0))
    batch = build_batch(lanes, [Share(lane=0, start=2, count=1, draft=draft)])
    assert [row.attends for row in rows_of(batch)] == [(0, 1, 2), (0, 1, 2, 3), (0, 1, 2, 4), (0, 1, 2, 3, 5)]
    assert batch.positions.tolist() == [2, 3, 3, 4]


def test_a_batch_does_not_follow_the_lanes() -> None:
    """Drafters write into the lanes while a batch may still be in use."""
    lanes = Lanes(count=1, max_context=20, max_draft=4)
    lanes.pages_np[0] = 0
    batch = build_batch(lanes, [Share(lane=0, start=0, count=3)])
    lanes.tokens_np[:] = 9
    lanes.pages_np[:] = 9
    assert batch.tokens.tolist() == [0, 0, 0]
    assert batch.page_table.flatten().unique().tolist() == [0]
