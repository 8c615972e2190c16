"""The default rule: the target draws its own token at every row, and the draft lives where it guessed it.

Exact token by token: what is emitted is what the target draws with the noise of (seed, position), whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.draft import Draft
from paceline.types import Verdict


def accept_coupled(draft: Draft, drawn: Sequence[int]) -> Verdict:
    """`drawn`: what the target draws after the last committed token, and after each token of the draft.

    Parents stand before their children and siblings differ, so that one look at each token finds the path. In plain
    Python: it is the usual rule, and tensors would cost more than all of it.
    """
    path: list[int] = []
    at, wanted = -1, drawn[0]
    parents = draft.parents or range(-1, len(draft.tokens) - 1)
    for node, (parent, token) in enumerate(zip(parents, draft.tokens, strict=True)):
        if parent == at and token == wanted:
            path.append(node)
            at, wanted = node, drawn[node + 1]
    return Verdict(path=tuple(path), token=wanted)
