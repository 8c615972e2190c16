"""The default rule: the target draws its own token after every row, and drafted tokens equal to it are accepted.

Exact token by token: the emitted token is the one that the target draws with the noise of (seed, position), whatever
was drafted.
"""

from __future__ import annotations

from typing import Protocol

from paceline.draft import Draft
from paceline.types import Verdict


class DrawnTokens(Protocol):
    """The target's tokens by row. Rows are asked for along the path, each once and a parent before its child."""

    def __getitem__(self, row: int, /) -> int: ...


def accept_coupled(draft: Draft, drawn: DrawnTokens) -> Verdict:
    """Follow the draft for as long as it guessed the target's tokens.

    `drawn` are the target's tokens after the last committed token and after each token of the draft. Parents come
    before their children and siblings differ, so one loop over the draft finds the path. Most drafts are judged
    here, in plain Python, because tensors would take longer.
    """
    path: list[int] = []
    at, wanted = -1, drawn[0]
    parents = draft.parents or range(-1, len(draft.tokens) - 1)
    for node, (parent, token) in enumerate(zip(parents, draft.tokens, strict=True)):
        if parent == at and token == wanted:
            path.append(node)
            at, wanted = node, drawn[node + 1]
    return Verdict(path=tuple(path), token=wanted)
