"""From "compute tokens [a, b) of these sequences, with these drafts" to the tensors of one forward pass.

Rows of one share, for 3 committed tokens from position 40 and a draft of 2:

    row        0    1    2  │  3    4
    position  40   41   42  │ 43   44     a chain; in a tree the position is that of the node's depth
    slot of   40   41   42  │ 43   44     always the order of rows: the tree is straightened at commit

After a pass over all weights the caches are cold: a call into torch costs tens of microseconds, and one into numpy
several. So values are collected in lists and packed at once into memory that was made for an earlier batch of the same
shape: a batch is valid until the next one of its shape is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

import numpy as np
import torch

from paceline.draft import EMPTY, Draft
from paceline.kernels.base import PAGE_SIZE, Batch
from paceline.runner.lanes import Lanes

COLUMNS = 8  # of the smallest page table; they double, so that their shape changes rarely
DEPTHS = 4  # and the paths of trees by so many tokens
MAX_MEMORIES = 256


@dataclass(slots=True)
class Share:
    """One sequence's part of a pass: `count` committed tokens from `start`, then its draft."""

    lane: int
    start: int
    count: int
    draft: Draft = EMPTY
    outs: int = 1  # logits are wanted for the last `outs` committed rows, and for every drafted one
    seed: int = 0  # of the noise that tokens are drawn with in the pass
    inverse_temperature: float = 0.0  # the inverse temperature; 0: without noise

    @property
    def rows(self) -> int:
        return self.count + len(self.draft.tokens)


def build_batch(
    lanes: Lanes, shares: Sequence[Share], *, ahead: int = 0, beyond: int = 0, features: bool = True
) -> Batch:
    """The tensors of one pass. The drafted tokens must already stand in `lanes.tokens` behind the committed ones. A row
    has the token that stands `ahead` of its position. Page tables reach `beyond` the last row by so many positions.
    `features`: whether hidden states are wanted."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    outs: list[int] = []
    starts, bases, roots = [0], [], []
    tree = False
    for share in shares:
        start, draft = share.start, share.draft
        end = start + share.count + len(draft.tokens)
        tokens += lanes.texts[share.lane][start + ahead : end + ahead].tolist()
        positions += range(start, end)
        slots += lanes.slots_of(share.lane, start, end)
        rows = len(tokens)
        outs += range(rows - share.outs - len(draft.tokens), rows)
        starts.append(rows)
        bases.append(end)
        roots.append(rows - len(draft.tokens) - 1)
        tree = tree or (bool(draft.parents) and not draft.is_chain)
    tails = _plant_trees(shares, positions, bases, slots, starts) if tree else []
    columns = _columns(max(bases) + beyond, most=len(lanes.tables[0]))
    shape = Shape(len(tokens), len(shares), len(outs), columns, len(tails) // len(tokens), features)
    memory = lanes.memories.get(shape) or _new_memory(lanes, shape)
    memory.write(lanes, shares, tokens + positions + slots + starts + bases + roots + outs + tails)
    return memory.batch


class Shape(NamedTuple):
    """What a batch is made for."""

    rows: int
    sequences: int
    outs: int
    columns: int  # of the page table
    depth: int  # of the tails; 0: there are none
    features: bool


class Memory:
    """The memory of a batch, to be written at once.

    seeds │ inverse temperatures │ tokens │ positions │ slots │ row_starts │ bases │ roots │ logit_rows │ tails
    and the page table
    """

    def __init__(self, shape: Shape) -> None:
        rows, sequences, depth = shape.rows, shape.sequences, shape.depth
        sizes = [rows, rows, rows, sequences + 1, sequences, sequences, shape.outs, rows * depth]
        memory = np.zeros(3 * sequences + sum(sizes), dtype=np.int32)  # a seed takes two
        table = np.zeros(sequences * shape.columns, dtype=np.int32)
        parts = torch.from_numpy(memory[3 * sequences :]).split_with_sizes(sizes)
        self.batch = Batch(
            tokens=parts[0],
            positions=parts[1],
            slots=parts[2],
            row_starts=parts[3],
            bases=parts[4],
            page_table=torch.from_numpy(table).view(sequences, shape.columns),
            roots=parts[5],
            logit_rows=parts[6],
            tails=parts[7].view(rows, depth) if depth else None,
            features=shape.features,
            seeds=torch.from_numpy(memory[: 2 * sequences].view(np.int64)),
            inverse_temperatures=torch.from_numpy(memory[2 * sequences : 3 * sequences].view(np.float32)),
        )
        self._layout = Struct(f"={sequences}Q{sequences}f{sum(sizes)}i")
        self._values, self._table, self._columns = memory.data, table.data, shape.columns

    def write(self, lanes: Lanes, shares: Sequence[Share], values: Sequence[int]) -> None:
        seeds, inverse_temperatures, width, at = [], [], self._columns, 0
        for share in shares:
            seeds.append(share.seed)
            inverse_temperatures.append(share.inverse_temperature)
            self._table[at : at + width] = lanes.tables[share.lane][:width]
            at += width
        self._layout.pack_into(self._values, 0, *seeds, *inverse_temperatures, *values)


def _columns(positions: int, *, most: int) -> int:
    columns = COLUMNS
    while columns * PAGE_SIZE < positions:
        columns *= 2
    return min(columns, most)


def _new_memory(lanes: Lanes, shape: Shape) -> Memory:
    if len(lanes.memories) == MAX_MEMORIES:
        lanes.memories.clear()
    lanes.memories[shape] = Memory(shape)
    return lanes.memories[shape]


def _plant_trees(
    shares: Sequence[Share], positions: list[int], bases: list[int], slots: list[int], starts: Sequence[int]
) -> list[int]:
    """Correct `positions` and `bases` in place where drafts branch, and return the ancestors' slots of every row."""
    paths: list[list[int]] = []  # one a row, the row itself last; nothing where there is no tree
    for i, share in enumerate(shares):
        first = starts[i] + share.count  # row of the first drafted token
        paths += [[]] * share.count
        if share.draft.is_chain:
            paths += [[]] * len(share.draft)
            continue
        bases[i] = base = share.start + share.count
        for row, parent in enumerate(share.draft.parents, first):
            path = [*(paths[first + parent] if parent >= 0 else ()), slots[row]]
            positions[row] = base + len(path) - 1
            paths.append(path)
    depth = -(-max(map(len, paths)) // DEPTHS) * DEPTHS
    return [slot for path in paths for slot in (*path, *[0] * (depth - len(path)))]
