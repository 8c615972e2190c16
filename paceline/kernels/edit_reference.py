"""Penalties, bias and masks of sequences on a device, in plain torch: the oracle of kernels/cuda/edit.py.

    edit    apply to rows of logits what sampling/sampler.py defines as `Sampler.edit`, in the same order
    count   count the new tokens of each seat, so that the next round's penalties know them

Each lane has a row of `marks`, one number for each token: how often the output has it, and two flags.

    marks    │ 31: a stop token │ 30: in the prompt │ 29 … 0: occurrences in the output │

A row of logits is edited as if its ancestors in the draft had been committed. Each operation is rounded to float32 by
itself, as on the host. Rows of lanes that edit nothing stay as they are.
"""

from __future__ import annotations

from enum import IntFlag
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.kernels.round_reference import DeviceLanes

IS_STOP = -(2**31)  # bit 31
IN_PROMPT = 2**30
OCCURRENCES = 2**30 - 1  # mask of the bits that count


class Edits(IntFlag):
    """The edits of a lane."""

    PENALISES = 1  # repetition, presence, frequency
    WAITS = 2  # no stop token before `stops_from`
    BIASES = 4  # `bias` is added
    MASKS = 8  # a grammar says which tokens may be drawn, see RowMasks


class EditedLanes(DeviceLanes, Protocol):
    """The lanes of a device with what edits need, see runner/rounds/device_state.py."""

    edits: Tensor  # int32 [lanes + 1], flags of Edits
    repetition: Tensor  # float32 [lanes + 1]
    presence: Tensor  # float32 [lanes + 1]
    frequency: Tensor  # float32 [lanes + 1]
    stops_from: Tensor  # int32 [lanes + 1]; first position whose token may be a stop token
    marks: Tensor  # int32 [lanes + 1, vocab]
    bias: Tensor  # float32 [lanes + 1, vocab]


class RowMasks(NamedTuple):
    """The tokens that may be drawn from rows of logits."""

    which: Tensor  # int32 [rows]: index of each row's mask; -1: it has none
    words: Tensor  # int32 [masks, words]; token t is bit t % 32 of word t // 32


def edit(
    logits: Tensor,
    state: EditedLanes,
    *,
    lanes: Tensor,
    positions: Tensor | None = None,
    offset: int = 0,
    ancestors: Tensor | None = None,
    raw: Tensor | None = None,
    masks: RowMasks | None = None,
    ids: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Edit rows of logits float32 [rows, vocab] in place; `lanes` int32 [rows] says whose they are. `ids` int32
    [columns] has the token of each column, if the columns are not the whole vocabulary.

    The token drawn from a row has the position `positions[row] + offset`; without `positions` it is the lane's length +
    `offset`. The tokens of the draft before it are the row of `ancestors` int32 [rows, depth], filled up with -1.
    Without `ancestors` the draft is a chain: all tokens between the lane's length and that position. Edited rows are
    first copied to `raw` float32 [rows, vocab], if it is given. A row's mask decides alone whether its token may be a
    stop token."""
    lane, columns = lanes.long(), torch.arange(logits.shape[1], device=lanes.device) if ids is None else ids.long()
    edits = state.edits[lane, None]  # [rows, 1]
    if raw is not None:
        raw[: len(logits)].copy_(torch.where(edits != 0, logits, raw[: len(logits)]))
    length = state.lengths[lane]
    at = (length if positions is None else positions) + offset  # [rows]
    before = _chain(state, lane, length, at) if ancestors is None else ancestors.long()
    marks = _marks_with(state.marks[lane], before)[:, columns]
    values = _penalise(logits, marks, state, lane)
    values = torch.where(edits & Edits.PENALISES != 0, values, logits)
    masked = torch.zeros_like(edits, dtype=torch.bool) if masks is None else masks.which[: len(logits), None] >= 0
    early = (edits & Edits.WAITS != 0) & (at < state.stops_from[lane])[:, None] & ~masked
    values = values.masked_fill(early & (marks < 0), -torch.inf)
    if masks is not None:
        words = masks.words[masks.which[: len(logits)].clamp(min=0).long()]
        values = values.masked_fill(masked & ~_allowed(words)[:, columns], -torch.inf)
    values = torch.where(edits & Edits.BIASES != 0, values + state.bias[lane][:, columns], values)
    logits.copy_(torch.where(edits != 0, values, logits))


def count(state: EditedLanes, *, seats: Tensor, outcomes: Tensor, pdl: bool = False) -> None:
    """Count new tokens in the marks of lanes with penalties. `outcomes` int32 [seats, …] is what `accept` reports."""
    lane = seats.long()
    step = torch.arange(outcomes.shape[1] - 2, device=seats.device)
    new = outcomes[:, 2:].long()
    counted = (step <= outcomes[:, :1]) & (state.edits[lane, None] & Edits.PENALISES != 0)
    state.marks.index_put_((lane[:, None], torch.where(counted, new, 0)), counted.int(), accumulate=True)


def _chain(state: EditedLanes, lane: Tensor, length: Tensor, at: Tensor) -> Tensor:
    """Return the drafted tokens before each row's token, int64 [rows, depth], filled up with -1."""
    depth = int((at - length).clamp(min=0).max()) if len(at) else 0
    place = length[:, None] + torch.arange(depth, device=lane.device)
    inside = place < at[:, None]
    tokens = state.tokens[lane[:, None], place.clamp(max=state.tokens.shape[1] - 1)]
    return torch.where(inside, tokens, -1).long()


def _marks_with(marks: Tensor, ancestors: Tensor) -> Tensor:
    """Add the ancestors [rows, depth] to marks [rows, vocab]."""
    there = ancestors >= 0
    return marks.scatter_add(1, torch.where(there, ancestors, 0), there.int())


def _penalise(logits: Tensor, marks: Tensor, state: EditedLanes, lane: Tensor) -> Tensor:
    repetition = state.repetition[lane, None]
    counts = (marks & OCCURRENCES).float()
    seen = (marks & (IN_PROMPT | OCCURRENCES)) != 0
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    values = torch.where(seen, scaled, logits)
    return values - (state.frequency[lane, None] * counts + state.presence[lane, None] * (counts > 0))


def _allowed(masks: Tensor) -> Tensor:
    """Unpack masks int32 [rows, words] to bool [rows, 32 * words]."""
    bits = masks[:, :, None] >> torch.arange(32, device=masks.device)
    return ((bits & 1) != 0).flatten(1)
