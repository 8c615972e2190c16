"""Kernels that only requests with certain parameters need, compiled at the start so that none of them waits."""

from __future__ import annotations

import copy
from collections.abc import Collection
from functools import partial

import torch

from paceline.kernels.cuda.edit import count, edit
from paceline.kernels.cuda.score import score, score_pairs
from paceline.kernels.edit_reference import RowMasks
from paceline.runner.rounds.device_state import DeviceState
from paceline.sampling.words import mask_words

TOPS = (0, 1, 2, 3, 5, 10, 20)  # numbers of alternatives: one of each size of the kernel up to 32


def compile_parameters(
    state: DeviceState, *, vocab: int, heads: Collection[int] = (), trees: bool = False, pdl: bool
) -> None:
    """Ask for the kernels of edits and scores, within a block of `kernels.cuda.compiling`: nothing is launched.

    `heads`: the vocabulary of each head; `trees`: a drafter drafts some."""
    lanes = torch.zeros(1, dtype=torch.int32, device=state.device)
    logits = torch.zeros((1, vocab), device=state.device)
    tables = copy.copy(state)  # with tables of one lane, because the real ones may never be needed
    tables.marks, tables.bias = lanes.new_zeros((1, vocab)), logits
    pairs = lanes.new_zeros((1, 1))
    edit(logits, tables, lanes=lanes, pdl=pdl)
    for columns in heads:
        edit(torch.zeros((1, columns), device=state.device), tables, lanes=lanes, ids=lanes, pdl=pdl)
    for masks in (None, RowMasks(lanes, lanes.new_zeros((1, mask_words(vocab))))):
        edit(logits, tables, lanes=lanes, raw=logits, masks=masks, pdl=pdl)
        for ancestors in (None, pairs)[: 1 + trees]:
            placed = partial(edit, positions=lanes, offset=1, ancestors=ancestors)
            placed(logits, tables, lanes=lanes, raw=logits, masks=masks, pdl=pdl)
    for draft in (0, 1, 2, 4, 8, 16):
        outcomes, pairs = lanes.new_zeros((1, 4 + 2 * draft)), lanes.new_zeros((1, 1 + draft))
        count(tables, seats=lanes, outcomes=outcomes, pdl=pdl)
        for tree in (False, True)[: 1 + trees]:
            listed = partial(score_pairs, row_starts=lanes, rows=pairs, tokens=pairs, tree=tree)
            listed(outcomes, lanes=lanes, scored=state.scored, pdl=pdl)
    for top in TOPS:
        out = lanes.new_zeros((1, 2 + 2 * min(top, vocab)))
        score(logits, rows=lanes, tokens=lanes, out=out, pdl=pdl)
        score(logits, rows=lanes, tokens=lanes, out=out, raw=logits, edits=state.edits, lanes=lanes, pdl=pdl)
