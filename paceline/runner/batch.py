"""From "compute tokens [a, b) of these sequences, with these drafts" to the tensors of one forward pass.

Rows of one share, for 3 committed tokens from position 40 and a draft of 2:

    row        0    1    2  │  3    4
    position  40   41   42  │ 43   44     a chain; in a tree the position is that of the node's depth
    slot of   40   41   42  │ 43   44     always the order of rows: the tree is straightened at commit
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline.draft import EMPTY, Draft
from paceline.kernels.base import PAGE_SIZE, Batch
from paceline.runner.lanes import Lanes


@dataclass(frozen=True, slots=True)
class Share:
    """One sequence's part of a pass: `count` committed tokens from `start`, then its draft."""

    lane: int
    start: int
    count: int
    draft: Draft = EMPTY
    outs: int = 1  # logits are wanted for the last `outs` committed rows, and for every drafted one

    @property
    def rows(self) -> int:
        return self.count + len(self.draft)


def build_batch(lanes: Lanes, shares: Sequence[Share]) -> Batch:
    """The tensors of one pass. The drafted tokens must already stand in `lanes.tokens` behind the committed ones."""
    lane = np.array([share.lane for share in shares])
    start = np.array([share.start for share in shares])
    rows = np.array([share.rows for share in shares])
    row_starts = np.concatenate(([0], np.cumsum(rows))).astype(np.int32)
    total = int(row_starts[-1])
    lane_of_row = np.repeat(lane, rows)
    index = np.arange(total) - np.repeat(row_starts[:-1] - start, rows)  # the place in the lane: position, if a chain
    slots = lanes.pages_np[lane_of_row, index // PAGE_SIZE] * PAGE_SIZE + index % PAGE_SIZE
    columns = -(-int((start + rows).max()) // PAGE_SIZE)
    positions, bases, tails = index.astype(np.int32), (start + rows).astype(np.int32), None
    if not all(share.draft.is_chain for share in shares):
        tails = _plant_trees(shares, positions, bases, slots, row_starts)
    return Batch(
        tokens=torch.from_numpy(lanes.tokens_np[lane_of_row, index]),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(slots.astype(np.int32)),
        row_starts=torch.from_numpy(row_starts),
        bases=torch.from_numpy(bases),
        page_table=torch.from_numpy(lanes.pages_np[lane, :columns]),
        logit_rows=torch.from_numpy(_logit_rows(shares, row_starts, total)),
        tails=None if tails is None else torch.from_numpy(tails),
    )


def _logit_rows(shares: Sequence[Share], row_starts: np.ndarray, total: int) -> np.ndarray:
    outs = [share.outs + len(share.draft) for share in shares]
    if sum(outs) == total:
        return np.arange(total, dtype=np.int32)
    ends = row_starts[1:].tolist()
    parts = [np.arange(end - out, end, dtype=np.int32) for end, out in zip(ends, outs, strict=True)]
    return np.concatenate(parts)


def _plant_trees(
    shares: Sequence[Share], positions: np.ndarray, bases: np.ndarray, slots: np.ndarray, row_starts: np.ndarray
) -> np.ndarray:
    """Correct `positions` and `bases` in place where drafts branch, and return the ancestors' slots of every row."""
    depths = max(len(share.draft) for share in shares)
    tails = np.zeros((len(positions), depths), dtype=np.int32)
    for i, share in enumerate(shares):
        if share.draft.is_chain:
            continue
        first = int(row_starts[i]) + share.count  # row of the first drafted token
        bases[i] = share.start + share.count
        for node, parent in enumerate(share.draft.parents):
            row, depth = first + node, 0
            if parent >= 0:
                depth = int(positions[first + parent] - bases[i]) + 1
                tails[row, :depth] = tails[first + parent, :depth]
            tails[row, depth] = slots[row]
            positions[row] = bases[i] + depth
    return tails
