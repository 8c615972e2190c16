"""The block-wise rule: judge a chain as a whole, so that a likely token can make up for an unlikely one before it.

It is for chains whose tokens were drawn from known distributions q. The weight w of a prefix is the product of p/q over
its tokens, cut to 1 after each of them. The longest prefix whose coin is below its h is accepted:

    w(0) = 1     w(i) = min(1, w(i-1) · p(i) / q(i))
    r(i) = Σ (w(i) · p - q)⁺            summed over all candidates for the token after i
    h(i) = r(i) / (r(i) + 1 - w(i))     for the last token of the chain: h(i) = w(i)

The next token is drawn from the positive part of w · p - q, or from p if the whole chain was accepted. A prefix is then
accepted with probability w given its tokens, and the emitted text is distributed as the target's own. On average the
rule accepts at least as many tokens as `accept_rejection` (Sun et al. 2024). It uses coins beyond the accepted tokens,
so each round needs coins of its own. The length of the chain may depend on its tokens. A draft without distributions is
judged by `accept_coupled`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.accept.rows import Outcome, Rows


def accept_block(rows: Rows, p: Tensor, q: Tensor, coins: Tensor, noise: Tensor) -> Outcome:
    """Judge chains. The arguments are those of `accept_rejection`, but the coins must belong to this round alone."""
    index = torch.arange(len(rows.tokens), device=rows.tokens.device)
    after = (index + 1).clamp(max=len(index) - 1)
    goes_on = (rows.owners[after] == rows.owners) & (after != index)  # [rows] a token was drafted after this one
    weights = _weights(rows, p, q)
    residual = (weights[:, None] * p - q[after]).clamp(min=0) * goes_on[:, None]  # [rows, vocab]
    left = residual.sum(-1)
    chance = torch.where(goes_on, left / (left + 1 - weights).clamp(min=1e-12), weights)
    lives = coins < chance
    lives.index_fill_(0, rows.roots, True)
    last = rows.roots.scatter_reduce(0, rows.owners, index * lives, "amax")
    corrected = left[last] > 0  # False: the whole chain was accepted, or p == q up to rounding
    rest = torch.where(corrected[:, None], residual[last], p[last])
    return Outcome(alive=index <= last[rows.owners], last=last, tokens=(rest.log() + noise).argmax(-1))


def _weights(rows: Rows, p: Tensor, q: Tensor) -> Tensor:
    """Return the weights w [rows]; 1 at a root. Each iteration extends the products by one row of the chains."""
    token = rows.tokens[:, None]
    ratio = (p[rows.parents].gather(1, token) / q.gather(1, token))[:, 0]
    ratio.index_fill_(0, rows.roots, 1)
    weights = torch.ones_like(ratio)
    for _ in range(rows.depth):
        weights = (weights[rows.parents] * ratio).clamp(max=1)
    return weights
