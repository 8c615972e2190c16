"""The lossy rules: accept a drafted token if the target finds it likely enough, even if it would draw another one.

The text is no longer distributed as the target's, and depends on the drafts, so a request must ask for these rules by
name. The target's own token is always accepted, so all of them accept at least as much as `accept_coupled`. The rule
"threshold" requires a fixed probability. The rule "typical" requires less if the target itself is uncertain (Cai et al.
2024): the smaller of ε and √ε · exp(-entropy). The rule "confidence" requires less of tokens that the drafter is sure
of, and more of others. A token that sampling parameters exclude has probability 0 and is never accepted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.accept.rows import Outcome, Rows, walk

TARGET_SCORE = 2.0  # score of the target's own token, above every probability
NEUTRAL = 0.5  # confidence of a token whose drafter reports none: the rule "confidence" is then "threshold"


def accept_likely(rows: Rows, targets: Tensor, p: Tensor, floors: Tensor) -> Outcome:
    """Accept tokens that the target drew itself or whose probability reaches the floor.

    `targets` int64 [rows]: the target's token after each row; p [rows, vocab]: its distribution there; `floors` [rows]:
    the probability that a token after each row needs.
    """
    return accept_needed(rows, targets, p, floors[rows.parents])


def accept_needed(rows: Rows, targets: Tensor, p: Tensor, needed: Tensor) -> Outcome:
    """Accept as `accept_likely`, where siblings may need different probabilities: `needed` [rows] is that of each row's
    own token. The likeliest of several siblings that have what they need is accepted."""
    p_token = p[rows.parents].gather(1, rows.tokens[:, None])[:, 0]
    score = torch.where(rows.tokens == targets[rows.parents], TARGET_SCORE, p_token)
    will_do = score >= needed
    right = will_do & _best_of_siblings(rows, torch.where(will_do, score, -1))
    alive, last = walk(rows, right)
    return Outcome(alive=alive, last=last, tokens=targets[last])


def typical_floors(p: Tensor, epsilons: Tensor) -> Tensor:
    """Return the probability [rows] that a token after each row needs, given the target's p [rows, vocab] and the ε of
    each row."""
    entropy = torch.special.entr(p).sum(-1)
    return torch.minimum(epsilons.sqrt() * torch.exp(-entropy), epsilons)


def needed_by_confidence(confidence: Tensor, thresholds: Tensor) -> Tensor:
    """Return the probability [rows] that each row's token needs: threshold^(2 · confidence). It is 1 for a token that
    the drafter does not believe in, the threshold at `NEUTRAL`, and its square for one that the drafter is sure of."""
    return thresholds ** (2 * confidence)


def _best_of_siblings(rows: Rows, score: Tensor) -> Tensor:
    """bool [rows]: True for the row with the highest score among its siblings; the first of equals."""
    score = score.clone()
    score.index_fill_(0, rows.roots, -1)  # a root follows itself, and must not count among its children
    best = torch.full_like(score, -1).scatter_reduce(0, rows.parents, score, "amax")
    index = torch.arange(len(score), device=score.device)
    places = torch.where(score == best[rows.parents], index, len(score))
    first = torch.full_like(index, len(score)).scatter_reduce(0, rows.parents, places, "amin")
    return index == first[rows.parents]
