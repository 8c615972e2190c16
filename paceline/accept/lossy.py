"""The lossy rules: a drafted token will do if the target holds it for likely enough, whatever it would have drawn.

What comes out is no longer the target's text, and depends on what was drafted: never used unless a request asks for it
by name. The target's own token is always accepted, so that neither accepts less than `accept_coupled`. `threshold` asks
for a fixed probability; `typical` for less where the target itself is in doubt (Cai et al. 2024): the smaller of ε and
√ε · exp(-entropy). A token that sampling parameters rule out has no probability, and neither accepts it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.accept.rows import Outcome, Rows, walk

OWN = 2.0  # the score of the target's own token: above every probability


def accept_likely(rows: Rows, targets: Tensor, p: Tensor, floors: Tensor) -> Outcome:
    """`targets` int64 [rows] is what the target draws after each row, p [rows, vocab] its distribution there, `floors`
    [rows] how likely a token after it must be."""
    p_token = p[rows.parents].gather(1, rows.tokens[:, None])[:, 0]
    score = torch.where(rows.tokens == targets[rows.parents], OWN, p_token)
    right = (score >= floors[rows.parents]) & _best_of_siblings(rows, score)
    alive, last = walk(rows, right)
    return Outcome(alive=alive, last=last, tokens=targets[last])


def typical_floors(p: Tensor, epsilon: float) -> Tensor:
    """[rows]; p [rows, vocab]."""
    entropy = torch.special.entr(p).sum(-1)
    return (math.sqrt(epsilon) * torch.exp(-entropy)).clamp(max=epsilon)


def _best_of_siblings(rows: Rows, score: Tensor) -> Tensor:
    """bool [rows]: of several tokens that would do after the same row one is taken, the first of the best."""
    score = score.clone()
    score[rows.roots] = -1  # a root follows itself, and is nobody's sibling
    best = torch.full_like(score, -1).scatter_reduce(0, rows.parents, score, "amax")
    index = torch.arange(len(score), device=score.device)
    places = torch.where(score == best[rows.parents], index, len(score))
    first = torch.full_like(index, len(score)).scatter_reduce(0, rows.parents, places, "amin")
    return index == first[rows.parents]
