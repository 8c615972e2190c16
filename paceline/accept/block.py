"""The block-wise rule: judge a chain as a whole, so that a good token can save a bad one before it.

For a chain whose tokens were drawn from known distributions q. With w the smaller of 1 and p/q over the tokens so far
(cut at 1 after each), the longest prefix whose coin falls below its h lives on:

    w(0) = 1     w(i) = min(1, w(i-1) · p(i) / q(i))
    r(i) = Σ (w(i) · p - q)⁺     over the token that would come after i
    h(i) = r(i) / (r(i) + 1 - w(i))     of the last token: w(i)

and the token after it is drawn from the positive part of w · p - q, or from p if all were accepted. Then a prefix lives
on with probability w given its tokens, and the emitted text is distributed as the target's own. In the mean no fewer
tokens are accepted than by `accept_rejection` (Sun et al. 2024). The rule looks at coins beyond the accepted tokens, so
each round needs coins of its own. The length of the chain may depend on its tokens. A draft without distributions is
judged by `accept_coupled`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.accept.rows import Outcome, Rows


def accept_block(rows: Rows, p: Tensor, q: Tensor, coins: Tensor, noise: Tensor) -> Outcome:
    """Judge chains. The arguments are those of `accept_rejection`, with coins of this round alone."""
    index = torch.arange(len(rows.tokens), device=rows.tokens.device)
    after = (index + 1).clamp(max=len(index) - 1)
    goes_on = (rows.owners[after] == rows.owners) & (after != index)  # [rows] a token was drafted after this one
    weights = _weights(rows, p, q)
    residual = (weights[:, None] * p - q[after]).clamp(min=0) * goes_on[:, None]  # [rows, vocab]
    left = residual.sum(-1)
    chance = torch.where(goes_on, left / (left + 1 - weights).clamp(min=1e-12), weights)
    lives = coins < chance
    lives[rows.roots] = True
    last = rows.roots.scatter_reduce(0, rows.owners, index * lives, "amax")
    corrected = left[last] > 0  # nothing left: accepted to the end, or p == q up to rounding
    rest = torch.where(corrected[:, None], residual[last], p[last])
    return Outcome(alive=index <= last[rows.owners], last=last, tokens=(rest.log() + noise).argmax(-1))


def _weights(rows: Rows, p: Tensor, q: Tensor) -> Tensor:
    """w [rows]: 1 at a root. Each turn carries the products one row further down the chains."""
    token = rows.tokens[:, None]
    ratio = (p[rows.parents].gather(1, token) / q.gather(1, token))[:, 0]
    ratio[rows.roots] = 1
    weights = torch.ones_like(ratio)
    for _ in range(rows.depth):
        weights = (weights[rows.parents] * ratio).clamp(max=1)
    return weights
