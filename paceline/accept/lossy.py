"""The lossy rules: accept a drafted token if the target finds it likely enough, even if it would draw another one.

The text is no longer distributed as the target's, and depends on the drafts, so a request must ask for these rules by
name. The target's own token is always accepted, so both rules accept at least as much as `accept_coupled`. The rule
"threshold" requires a fixed probability. The rule "typical" requires less if the target itself is uncertain (Cai et al.
2024): the smaller of ε and √ε · exp(-entropy). A token that sampling parameters exclude has probability 0 and is never
accepted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.accept.rows import Outcome, Rows, walk

TARGET_SCORE = 2.0  # score of the target's own token, above every probability


def accept_likely(rows: Rows, targets: Tensor, p: Tensor, floors: Tensor) -> Outcome:
    """Accept tokens that the target drew itself or whose probability reaches the floor.

    `targets` int64 [rows]: the target's token after each row; p [rows, vocab]: its distribution there; `floors` [rows]:
    the probability that a token after each row needs.
    """
    p_token = p[rows.parents].gather(1, rows.tokens[:, None])[:, 0]
    score = torch.where(rows.tokens == targets[rows.parents], TARGET_SCORE, p_token)
    right = (score >= floors[rows.parents]) & _best_of_siblings(rows, score)
    alive, last = walk(rows, right)
    return Outcome(alive=alive, last=last, tokens=targets[last])


def typical_floors(p: Tensor, epsilons: Tensor) -> Tensor:
    """Return the probability [rows] that a token after each row needs, given the target's p [rows, vocab] and the ε of
    each row."""
    entropy = torch.special.entr(p).sum(-1)
    return torch.minimum(epsilons.sqrt() * torch.exp(-entropy), epsilons)


def _best_of_siblings(rows: Rows, score: Tensor) -> Tensor:
    """bool [rows]: True for the row with the highest score among its siblings; the first of equals."""
    score = score.clone()
    score.index_fill_(0, rows.roots, -1)  # a root follows itself, and must not count among its children
    best = torch.full_like(score, -1).scatter_reduce(0, rows.parents, score, "amax")
    index = torch.arange(len(score), device=score.device)
    places = torch.where(score == best[rows.parents], index, len(score))
    first = torch.full_like(index, len(score)).scatter_reduce(0, rows.parents, places, "amin")
    return index == first[rows.parents]
