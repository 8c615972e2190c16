"""From "compute tokens [a, b) of these sequences, with these drafts" to the tensors of one forward pass.

Rows of one share, for 3 committed tokens from position 40 and a draft of 2:

    row        0    1    2  │  3    4
    position  40   41   42  │ 43   44     a chain; in a tree the position is that of the node's depth
    slot of   40   41   42  │ 43   44     always the order of rows: the tree is straightened at commit
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from paceline.draft import EMPTY, Draft
from paceline.kernels.base import PAGE_SIZE, Batch
from paceline.runner.lanes import Lanes, Memory

COLUMNS = 8  # page tables grow by so many pages, so that their shape changes rarely
MAX_MEMORIES = 256


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


def build_batch(
    lanes: Lanes, shares: Sequence[Share], *, ahead: int = 0, beyond: int = 0, features: bool = True
) -> Batch:
    """The tensors of one pass. The drafted tokens must already stand in `lanes.tokens` behind the committed ones. A row
    has the token that stands `ahead` of its position. Page tables reach `beyond` the last row by so many positions.
    `features`: whether hidden states are wanted.

    After a pass over all weights the caches are cold and every call into torch costs tens of microseconds. So values
    are collected in lists and written at once into tensors that were made for an earlier batch of the same shape: a
    batch is valid until the next one of its shape is built.
    """
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    outs: list[int] = []
    row_starts, bases = [0], []
    for share in shares:
        start, end = share.start, share.start + share.rows
        first = start // PAGE_SIZE
        pages = lanes.pages_np[share.lane, first : -(-end // PAGE_SIZE)].tolist()
        tokens += lanes.tokens_np[share.lane, start + ahead : end + ahead].tolist()
        positions += range(start, end)
        slots += [pages[place // PAGE_SIZE - first] * PAGE_SIZE + place % PAGE_SIZE for place in range(start, end)]
        rows = len(tokens)
        outs += range(rows - share.outs - len(share.draft), rows)
        row_starts.append(rows)
        bases.append(end)
    columns = -(-(max(bases) + beyond) // PAGE_SIZE)
    batch, flat, table = _memory(lanes, len(tokens), len(shares), len(outs), columns, features)
    tails = None
    if not all(share.draft.is_chain for share in shares):
        tails = torch.from_numpy(_plant_trees(shares, positions, bases, slots, row_starts))
    flat[:] = tokens + positions + slots + row_starts + bases + outs
    table[:] = lanes.pages_np[[share.lane for share in shares], : table.shape[1]]
    return batch if tails is None else replace(batch, tails=tails)


def _memory(lanes: Lanes, rows: int, sequences: int, outs: int, columns: int, features: bool) -> Memory:
    """A batch of this shape without its values, and its memory."""
    columns = min(-(-columns // COLUMNS) * COLUMNS, lanes.pages.shape[1])
    shape = rows, sequences, outs, columns, features
    if shape not in lanes.memories:
        if len(lanes.memories) == MAX_MEMORIES:
            lanes.memories.clear()
        lanes.memories[shape] = _new_memory(*shape)
    return lanes.memories[shape]


def _new_memory(rows: int, sequences: int, outs: int, columns: int, features: bool) -> Memory:
    flat = torch.zeros(3 * rows + 2 * sequences + 1 + outs, dtype=torch.int32)
    table = torch.zeros((sequences, columns), dtype=torch.int32)
    parts = flat.split_with_sizes([rows, rows, rows, sequences + 1, sequences, outs])
    batch = Batch(
        tokens=parts[0],
        positions=parts[1],
        slots=parts[2],
        row_starts=parts[3],
        bases=parts[4],
        logit_rows=parts[5],
        page_table=table,
        features=features,
    )
    return batch, flat.numpy(), table.numpy()


def _plant_trees(
    shares: Sequence[Share], positions: list[int], bases: list[int], slots: list[int], row_starts: list[int]
) -> np.ndarray:
    """Correct `positions` and `bases` in place where drafts branch, and return the ancestors' slots of every row."""
    depths = max(len(share.draft) for share in shares)
    tails = np.zeros((len(positions), depths), dtype=np.int32)
    for i, share in enumerate(shares):
        if share.draft.is_chain:
            continue
        first = row_starts[i] + share.count  # row of the first drafted token
        bases[i] = share.start + share.count
        for node, parent in enumerate(share.draft.parents):
            row, depth = first + node, 0
            if parent >= 0:
                depth = positions[first + parent] - bases[i] + 1
                tails[row, :depth] = tails[first + parent, :depth]
            tails[row, depth] = slots[row]
            positions[row] = bases[i] + depth
    return tails
