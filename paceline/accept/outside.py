"""Check the outcome of another package's rule before the engine uses it: a wrong path would corrupt the KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.accept.rows import Outcome, Rows
from paceline.accept.rule import Verification


def problem_of(outcome: object, given: Verification) -> str | None:
    """Return why the outcome cannot be committed; None: it can."""
    rows, vocab = given.rows, given.vocab_size
    if not isinstance(outcome, Outcome):
        return f"it returned a {type(outcome).__name__} and no Outcome"
    if not _is(outcome.alive, torch.bool, len(rows.tokens)):
        return f"Outcome.alive must be bool [{len(rows.tokens)}], one for each row"
    if not _is(outcome.tokens, torch.int64, len(rows.roots)):
        return f"Outcome.tokens must be int64 [{len(rows.roots)}], one for each sequence"
    if not bool(((outcome.tokens >= 0) & (outcome.tokens < vocab)).all()):
        return f"Outcome.tokens must be from 0 to {vocab - 1}"
    return None if _are_paths(rows, outcome.alive) else "the rows alive must be one path from the root of each sequence"


def _is(value: object, dtype: torch.dtype, length: int) -> bool:
    return isinstance(value, Tensor) and value.dtype == dtype and value.shape == (length,)


def _are_paths(rows: Rows, alive: Tensor) -> bool:
    """Return True if all roots are alive, the parent of each living row is alive, and no two have the same parent."""
    follows = alive.clone()
    follows[rows.roots] = False
    children = torch.zeros(len(alive), dtype=torch.int64).index_add_(0, rows.parents, follows.to(torch.int64))
    return bool(alive[rows.roots].all() and alive[rows.parents[follows]].all() and (children <= 1).all())
