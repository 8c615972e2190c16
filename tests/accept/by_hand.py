"""The rules as one would do them by hand, for one sequence at a time: what the tensors must agree with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.draft import Draft


def parents_of(draft: Draft) -> tuple[int, ...]:
    return draft.parents or tuple(range(-1, len(draft) - 1))


def coupled(draft: Draft, targets: Sequence[int]) -> tuple[list[int], int]:
    """The path and the token after it; targets[0] is drawn after the root, targets[1 + i] after token i."""
    path: list[int] = []
    at = -1
    while True:
        wanted = targets[at + 1]
        children = [i for i, parent in enumerate(parents_of(draft)) if parent == at and draft.tokens[i] == wanted]
        if not children:
            return path, wanted
        at = children[0]
        path.append(at)


def rejection(tokens: Sequence[int], p: Tensor, q: Tensor, coins: Tensor, noise: Tensor) -> tuple[list[int], int]:
    """p [len + 1, vocab]: the target after the root and each token; q [len, vocab], coins [len], noise [vocab]."""
    for i, token in enumerate(tokens):
        if float(coins[i]) * float(q[i, token]) >= float(p[i, token]):
            residual = (p[i] - q[i]).clamp(min=0)
            rest = residual if float(residual.sum()) > 0 else p[i]
            return list(range(i)), int((rest.log() + noise).argmax())
    return list(range(len(tokens))), int((p[len(tokens)].log() + noise).argmax())


def block(tokens: Sequence[int], p: Tensor, q: Tensor, coins: Tensor, noise: Tensor) -> tuple[list[int], int]:
    """As for `rejection`: the longest prefix whose coin falls lives on."""
    weights, lives = [1.0], 0
    for i, token in enumerate(tokens):
        weights.append(min(1.0, weights[-1] * float(p[i, token]) / float(q[i, token])))
        chance = weights[-1]
        if i + 1 < len(tokens):
            left = float((weights[-1] * p[i + 1] - q[i + 1]).clamp(min=0).sum())
            chance = left / (left + 1 - weights[-1]) if left else 0.0
        lives = i + 1 if float(coins[i]) < chance else lives
    rest = p[lives]
    if lives < len(tokens):
        residual = (weights[lives] * p[lives] - q[lives]).clamp(min=0)
        rest = residual if float(residual.sum()) > 0 else rest
    return list(range(lives)), int((rest.log() + noise).argmax())


def likely(draft: Draft, targets: Sequence[int], p: Tensor, floors: Sequence[float]) -> tuple[list[int], int]:
    """As for `coupled`, but the most likely child will do where it reaches the floor; p [len + 1, vocab]."""
    path: list[int] = []
    at = -1
    while True:
        children = [i for i, parent in enumerate(parents_of(draft)) if parent == at]
        own = [i for i in children if draft.tokens[i] == targets[at + 1]]
        good = [i for i in children if float(p[at + 1, draft.tokens[i]]) >= floors[at + 1]]
        best = own or sorted(good, key=lambda i: -float(p[at + 1, draft.tokens[i]]))
        if not best:
            return path, targets[at + 1]
        at = best[0]
        path.append(at)


@dataclass
class Layout:
    """The tensors of Rows, built row by row."""

    tokens: list[int]
    parents: list[int]
    owners: list[int]
    roots: list[int]
    depth: int

    def tensors(self) -> dict[str, Tensor]:
        names = ("tokens", "parents", "owners", "roots")
        return {name: torch.tensor(getattr(self, name), dtype=torch.int64) for name in names}


def lay_out(drafts: Sequence[Draft]) -> Layout:
    layout = Layout([], [], [], [], max(len(draft) for draft in drafts))
    for owner, draft in enumerate(drafts):
        root = len(layout.tokens)
        layout.roots.append(root)
        layout.tokens += [0, *draft.tokens]
        layout.parents += [root, *(root + 1 + parent for parent in parents_of(draft))]
        layout.owners += [owner] * (1 + len(draft))
    return layout


def random_tree(random: np.random.Generator, length: int, vocab: int) -> Draft:
    seen: list[tuple[int, int]] = []
    while len(seen) < length:
        pair = int(random.integers(-1, len(seen))), int(random.integers(vocab))
        if pair not in seen:
            seen.append(pair)
    return Draft(tokens=tuple(token for _, token in seen), parents=tuple(parent for parent, _ in seen))


def random_chain(random: np.random.Generator, length: int, vocab: int) -> Draft:
    return Draft(tokens=tuple(random.integers(vocab, size=length).tolist()))


def split(alive: Tensor, drafts: Sequence[Draft]) -> list[list[int]]:
    """The path of each draft, out of the rows alive; a root that is not alive is an error."""
    paths, row = [], 0
    for draft in drafts:
        assert bool(alive[row]), "a root must be alive"
        paths.append([i for i in range(len(draft)) if bool(alive[row + 1 + i])])
        row += 1 + len(draft)
    return paths
