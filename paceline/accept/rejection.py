"""The classical rule: accept a drafted token with probability min(1, p/q), correct the first rejection.

It is for chains whose tokens were drawn from known distributions q. The token after the last accepted one is drawn from
the positive part of p - q if a token was rejected there, from p otherwise. Each emitted token is then distributed as
the target's own (Leviathan et al. 2023, Chen et al. 2023). A draft without distributions needs no coin: if q gives one
token probability 1, the rule is equivalent to drawing from p and comparing, as `accept_coupled` does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.accept.rows import Outcome, Rows, walk


def accept_rejection(rows: Rows, p: Tensor, q: Tensor, coins: Tensor, noise: Tensor) -> Outcome:
    """Judge chains. p [rows, vocab]: the target's distribution after each row; q [rows, vocab]: the drafter's
    distribution that each row was drawn from (ignored at roots); coins [rows]: uniform; noise [seqs, vocab]: Gumbel,
    for the token after the last accepted one."""
    token = rows.tokens[:, None]
    p_token = p[rows.parents].gather(1, token)[:, 0]
    q_token = q.gather(1, token)[:, 0]
    right = coins * q_token < p_token
    alive, last = walk(rows, right)
    rest = _rest(rows, p[last], q, last)
    return Outcome(alive=alive, last=last, tokens=(rest.log() + noise).argmax(-1))


def _rest(rows: Rows, p_last: Tensor, q: Tensor, last: Tensor) -> Tensor:
    """Return the weights [seqs, vocab] to draw the next token by. In a chain the rejected row is `last` + 1."""
    rejected = (last + 1).clamp(max=len(rows.tokens) - 1)
    was_rejected = (rows.owners[rejected] == rows.owners[last]) & (rejected != last)
    residual = (p_last - q[rejected]).clamp(min=0)
    empty = residual.sum(-1, keepdim=True) <= 0  # p == q up to rounding: nothing to correct
    return torch.where(was_rejected[:, None] & ~empty, residual, p_last)
