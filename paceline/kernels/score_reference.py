"""Log-probabilities of tokens on a device, in plain torch: the oracle of kernels/cuda/score.py.

    score         score tokens by the raw logits of their rows, as sampling/sampler.py defines it
    score_pairs   list the rows and new tokens of a round's seats

A report has one row for each token:

    log-probability │ rank │ best tokens [top] │ their log-probabilities [top]        int32; floats by their bits
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.sampling.sampler import best_tokens, token_ranks


def score(
    logits: Tensor,
    *,
    rows: Tensor,
    tokens: Tensor,
    out: Tensor,
    raw: Tensor | None = None,
    edits: Tensor | None = None,
    lanes: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Score `tokens` int32 [n] by rows of logits float32 […, vocab], into the report `out` int32 [n, 2 + 2 * top].

    `rows` int32 [n] are the rows; the report of a negative one is arbitrary. Rows of lanes that edit logits are in
    `raw`: then `lanes` int32 [rows of logits] has the lane of each, and `edits` is the table of kernels/edit_reference.
    """
    top, row, vocab = out.shape[1] // 2 - 1, rows.long().clamp(min=0), logits.shape[1]
    values = logits[row]
    if raw is not None:
        assert edits is not None
        assert lanes is not None, "edited rows are found by their lanes"
        values = torch.where(edits[lanes.long()[row], None] != 0, raw[row, :vocab], values)
    scores = torch.log_softmax(values, dim=-1)
    chosen = tokens.long()[:, None].clamp(0, vocab - 1)
    best = best_tokens(values, top)
    parts = [scores.gather(1, chosen).view(torch.int32), token_ranks(values, chosen).int()[:, None]]
    parts += [best.int(), scores.gather(1, best).view(torch.int32)]
    out.copy_(torch.cat(parts, dim=1))


def score_pairs(
    outcomes: Tensor,
    *,
    lanes: Tensor,
    scored: Tensor,
    row_starts: Tensor,
    rows: Tensor,
    tokens: Tensor,
    tree: bool = False,
    pdl: bool = False,
) -> None:
    """List the row and the token of each new token of a round: `rows` and `tokens` int32 [seats, k + 1].

    `outcomes` is what `accept` reports for a longest draft of k, or `tree_accept` with `tree`. `row_starts` has the
    first row of each seat, and `lanes` int32 its lane. Rows are -1 for tokens that do not exist, and for seats whose
    lane is 0 in the table `scored`.
    """
    step = torch.arange(rows.shape[1], device=rows.device)
    new = (step <= outcomes[:, :1]) & (scored[lanes.long(), None] != 0)
    place = step.expand_as(new)
    if tree:
        path = outcomes[:, 2 * rows.shape[1] + 2 :][:, : rows.shape[1] - 1]
        place = torch.cat([torch.zeros_like(path[:, :1]), 1 + path], dim=1) if rows.shape[1] > 1 else place
    rows.copy_(torch.where(new, row_starts[: len(rows), None] + place, -1))
    tokens.copy_(torch.where(new, outcomes[:, 2 : 2 + rows.shape[1]], 0))
