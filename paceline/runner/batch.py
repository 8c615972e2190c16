"""Build the tensors of one forward pass from "compute tokens [a, b) of these sequences, with these drafts".

Rows of one share, for 3 committed tokens from position 40 and a draft of 2:

    row        0    1    2  │  3    4
    position  40   41   42  │ 43   44     in a chain; in a tree the position follows from the node's depth
    slot of   40   41   42  │ 43   44     always in the order of rows: the accepted path is made contiguous at commit

After a pass over all weights the caches are cold: a call into torch costs tens of microseconds, and one into numpy
several (docs/experiments.md, "The host between passes"). So values are collected in lists and packed at once into the
memory of an earlier batch of the same shape. A batch is valid until the next one of its shape is built.
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

MIN_COLUMNS = 8  # pages in the smallest page table; doubled as needed, so that shapes change rarely
DEPTH_STEP = 4  # tokens; the depth of `tails` is a multiple of it, so that shapes change rarely
MAX_BATCH_MEMORIES = 256  # batch shapes whose memory is kept


@dataclass(slots=True)
class Share:
    """One sequence's rows of a pass: `count` committed tokens from position `start`, then its draft."""

    lane: int
    start: int
    count: int
    draft: Draft = EMPTY
    outs: int = 1  # last committed rows to compute logits for; drafted rows always have logits
    seed: int = 0  # seed of the noise if the pass draws tokens
    inverse_temperature: float = 0.0  # 0: no noise

    @property
    def rows(self) -> int:
        return self.count + len(self.draft.tokens)


def build_batch(
    lanes: Lanes,
    shares: Sequence[Share],
    *,
    ahead: int = 0,
    beyond: int = 0,
    features: bool = True,
    states: bool = False,
) -> Batch:
    """Build the tensors of one pass. The drafted tokens are already in `lanes.tokens`, behind the committed ones.

    A row of position p has the token of position p + `ahead`. Page tables reach `beyond` positions past the last row.
    `features` asks for hidden states at the taps, `states` for those after the last norm."""
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
    shape = BatchShape(len(tokens), len(shares), len(outs), columns, len(tails) // len(tokens), features, states)
    memory = lanes.batch_memories.get(shape) or _new_memory(lanes, shape)
    memory.write(lanes, shares, tokens + positions + slots + starts + bases + roots + outs + tails)
    return memory.batch


class BatchShape(NamedTuple):
    """The sizes of a batch; batches of equal shape share memory."""

    rows: int
    sequences: int
    outs: int
    columns: int  # columns of the page table
    depth: int  # columns of the tails; 0: no tree
    features: bool
    states: bool


class BatchMemory:
    """The memory of batches of one shape, written in one call:

    seeds │ inverse temperatures │ tokens │ positions │ slots │ row_starts │ bases │ roots │ logit_rows │ tails
    and the page table
    """

    def __init__(self, shape: BatchShape) -> None:
        rows, sequences, depth = shape.rows, shape.sequences, shape.depth
        sizes = [rows, rows, rows, sequences + 1, sequences, sequences, shape.outs, rows * depth]
        memory = np.zeros(3 * sequences + sum(sizes), dtype=np.int32)  # a seed takes two integers
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
            states=shape.states,
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
    columns = MIN_COLUMNS
    while columns * PAGE_SIZE < positions:
        columns *= 2
    return min(columns, most)


def _new_memory(lanes: Lanes, shape: BatchShape) -> BatchMemory:
    if len(lanes.batch_memories) == MAX_BATCH_MEMORIES:
        lanes.batch_memories.clear()
    lanes.batch_memories[shape] = BatchMemory(shape)
    return lanes.batch_memories[shape]


def _plant_trees(
    shares: Sequence[Share], positions: list[int], bases: list[int], slots: list[int], starts: Sequence[int]
) -> list[int]:
    """Correct `positions` and `bases` of trees in place; return `tails`: slots of each row's path, padded with 0."""
    paths: list[list[int]] = []  # slots of each row's path, the row itself last; empty outside of trees
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
    depth = -(-max(map(len, paths)) // DEPTH_STEP) * DEPTH_STEP
    return [slot for path in paths for slot in (*path, *[0] * (depth - len(path)))]
