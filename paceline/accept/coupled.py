"""The default rule: the target draws its own token at every row, and the draft lives where it guessed it.

Exact token by token: what is emitted is what the target draws with the noise of (seed, position), whatever was drafted.
"""

from __future__ import annotations

from torch import Tensor

from paceline.accept.rows import Outcome, Rows, walk


def accept_coupled(rows: Rows, targets: Tensor) -> Outcome:
    """`targets` int64 [rows] is what the target draws after each row."""
    right = rows.tokens == targets[rows.parents]
    alive, last = walk(rows, right)
    return Outcome(alive=alive, last=last, tokens=targets[last])
