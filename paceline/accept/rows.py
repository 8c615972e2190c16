"""The rows of one verification and the walk that every rule shares.

A row is a token to be judged by the row it follows; the first row of a sequence, its root, holds the last committed
token. A row lives on if it is right and the row it follows lives on. All of it is tensor operations, and none reads a
value back to the host: a device can run it alone.
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
    owners: Tensor  # int64 [rows] the sequence of each row
    roots: Tensor  # int64 [seqs] the root of each sequence
    depth: int  # depth of the deepest row; a root has 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The decision of a rule."""

    alive: Tensor  # bool [rows]; roots always are
    last: Tensor  # int64 [seqs] the deepest row alive
    tokens: Tensor  # int64 [seqs] the token that follows it


def walk(rows: Rows, right: Tensor) -> tuple[Tensor, Tensor]:
    """Find the rows alive, and the last one of each sequence, from "this row is right about its parent".

    Each turn looks twice as far towards the root as the one before. At most one of several siblings is right, so the
    rows alive form a path; parents come before children, so its end is its highest row.
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
