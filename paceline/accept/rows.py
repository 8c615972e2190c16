"""The rows of one verification and the walk that every rule shares.

A row is a drafted token, judged by the target's output after its parent row. The first row of a sequence, its root, is
the last committed token. A row is alive (accepted) if it is right and its parent is alive. Only tensor operations are
used, and none reads a value back to the host, so that a device can run them alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of several sequences, each root first, parents before children. Siblings differ in their token."""

    tokens: Tensor  # int64 [rows]
    parents: Tensor  # int64 [rows] parent row of each row; a root is its own parent
    owners: Tensor  # int64 [rows] the sequence of each row
    roots: Tensor  # int64 [seqs] the root of each sequence
    depth: int  # depth of the deepest row; a root has 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The decision of a rule."""

    alive: Tensor  # bool [rows] accepted rows; roots are always alive
    last: Tensor  # int64 [seqs] the deepest row alive
    tokens: Tensor  # int64 [seqs] the token that follows `last`


def walk(rows: Rows, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows alive, and the last one of each sequence. `right` bool [rows]: correct if its parent is alive.

    Each iteration looks twice as far towards the root as the one before. At most one of several siblings is right, so
    the rows alive form a path. Parents come before children, so its end is the row with the highest index.
    """
    alive, above = right.clone(), rows.parents
    alive.index_fill_(0, rows.roots, True)
    reach = 1
    while reach < rows.depth:
        alive = alive & alive[above]
        above = above[above]
        reach *= 2
    index = torch.arange(len(alive), device=alive.device) * alive
    last = rows.roots.scatter_reduce(0, rows.owners, index, "amax")
    return alive, last
