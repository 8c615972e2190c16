"""The rows of one verification and the walk that every rule shares.

A row is a token to be judged by the row it follows; the first row of a sequence, its root, holds the last committed
token. A row lives on if it is right and the row it follows lives on. Everything is tensors of fixed meaning and there
is no look at a value on the way: a device can run it without the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of several sequences, each root first, parents before children. Siblings differ in their token."""

    tokens: Tensor  # int64 [rows]
    parents: Tensor  # int64 [rows] the row it follows; a root follows itself
    owners: Tensor  # int64 [rows] which sequence
    roots: Tensor  # int64 [seqs]
    depth: int  # of the deepest row; a root has 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rule decided."""

    alive: Tensor  # bool [rows]; roots always are
    last: Tensor  # int64 [seqs] the deepest row alive
    tokens: Tensor  # int64 [seqs] the token that follows it


def walk(rows: Rows, right: Tensor) -> tuple[Tensor, Tensor]:
    """From "this row is right about its parent" to the rows alive and the last one of each sequence.

    Each turn looks twice as far towards the root as the one before. Since siblings differ, the rows alive form a
    path, and since parents stand before children its end is its highest row.
    """
    alive, above = right.clone(), rows.parents
    alive[rows.roots] = True
    reach = 1
    while reach < rows.depth:
        alive = alive & alive[above]
        above = above[above]
        reach *= 2
    index = torch.arange(len(alive), device=alive.device) * alive
    last = rows.roots.scatter_reduce(0, rows.owners, index, "amax")
    return alive, last
