"""Edit logits on a CUDA device: penalties, bias and masks; `edit_reference` defines it.

`edit` is one launch over chunks of the vocabulary and rows. Programs of lanes that edit nothing read one flag and end,
so that a row without edits costs nothing. `count` is one launch, with a program for each seat.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.edit_reference import IN_PROMPT, OCCURRENCES, EditedLanes, Edits, RowMasks

CHUNK = 4096  # tokens per program of `_edit`

_CHUNK = tl.constexpr(CHUNK)
_OCCURRENCES, _SEEN = tl.constexpr(OCCURRENCES), tl.constexpr(IN_PROMPT | OCCURRENCES)
_PENALISES, _WAITS, _BIASES, _ = (tl.constexpr(int(edit)) for edit in Edits)
_LOWEST = tl.constexpr(float("-inf"))


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
    """Edit rows of logits float32 [rows, vocab] in place, and keep the original ones in `raw`; see `edit_reference`."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1, "the logits of a row must be adjacent"
    assert state.marks.shape[1] >= vocab, "the tables of edits were not made, or are of another vocabulary"
    assert raw is None or raw.stride(1) == 1, "the logits of a row must be adjacent"
    which, words = (lanes, lanes[:, None]) if masks is None else masks
    _edit[(triton.cdiv(vocab, CHUNK), rows)](
        logits,
        logits.stride(0),
        vocab,
        logits if raw is None else raw,
        0 if raw is None else raw.stride(0),
        lanes,
        lanes if positions is None else positions,
        offset,
        state.lengths,
        state.tokens,
        state.tokens.stride(0),
        state.tokens.shape[1],
        lanes if ancestors is None else ancestors,
        0 if ancestors is None else ancestors.shape[1],
        state.edits,
        state.repetition,
        state.presence,
        state.frequency,
        state.stops_from,
        state.marks,
        state.bias,
        state.marks.stride(0),
        which,
        words,
        words.stride(0),
        lanes if ids is None else ids,
        IDS=ids is not None,
        PLACED=positions is not None,
        TABLE=ancestors is not None,
        RAW=raw is not None,
        MASKED=masks is not None,
        PDL=pdl,
        launch_pdl=pdl,
        enable_fp_fusion=False,
        num_warps=8,
    )


def count(state: EditedLanes, *, seats: Tensor, outcomes: Tensor, pdl: bool = False) -> None:
    """Count new tokens in the marks of lanes with penalties; `outcomes` is what `accept` reports."""
    _count[(len(seats),)](
        state.marks,
        state.marks.stride(0),
        state.edits,
        seats,
        outcomes,
        outcomes.stride(0),
        STEPS=triton.next_power_of_2(outcomes.shape[1] - 2),
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=1,
    )


def raw_rows(rows: int, vocab: int, device: torch.device) -> Tensor:
    """Return memory float32 [rows, vocab] for the `raw` logits of a round. Rounds share it with larger ones."""
    known = _raw_memory(vocab, device)
    if not known or len(known[-1]) < rows:
        known.append(torch.zeros((rows, vocab), device=device))
    return known[-1][:rows]


@cache
def _raw_memory(vocab: int, device: torch.device) -> list[Tensor]:
    """Memory of `raw_rows`, the largest last. Never freed: captured graphs keep the address."""
    return []


@triton.jit(do_not_specialize=["offset", "depth"])
def _edit(
    logits,
    stride,
    vocab,
    raw,
    raw_stride,
    lanes,
    positions,
    offset,
    lengths,
    lane_tokens,
    tokens_stride,
    width,
    ancestors,
    depth,
    edits,
    repetition,
    presence,
    frequency,
    stops_from,
    marks,
    bias,
    table_stride,
    which,
    words,
    words_stride,
    ids,
    IDS: tl.constexpr,
    PLACED: tl.constexpr,
    TABLE: tl.constexpr,
    RAW: tl.constexpr,
    MASKED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    lane = tl.load(lanes + row).to(tl.int64)
    wanted = tl.load(edits + lane)
    if wanted != 0:
        column = tl.program_id(0) * _CHUNK + tl.arange(0, _CHUNK)
        inside = column < vocab
        token = tl.load(ids + column, mask=inside, other=0) if IDS else column
        value = tl.load(logits + row * stride + column, mask=inside, other=0.0)
        if RAW:
            tl.store(raw + row * raw_stride + column, value, mask=inside)
        length = tl.load(lengths + lane)
        at = tl.load(positions + row if PLACED else lengths + lane) + offset
        early = ((wanted & _WAITS) != 0) & (at < tl.load(stops_from + lane))
        if MASKED:
            mask = tl.load(which + row).to(tl.int64)
            early = early & (mask < 0)
        penalised = (wanted & _PENALISES) != 0
        if penalised | early:
            mark = tl.load(marks + lane * table_stride + token, mask=inside, other=0)
            if penalised:
                if TABLE:
                    for i in range(depth):
                        mark += (token == tl.load(ancestors + row * depth + i)).to(tl.int32)
                else:
                    for place in range(length, tl.minimum(at, width)):
                        mark += (token == tl.load(lane_tokens + lane * tokens_stride + place)).to(tl.int32)
                value = _penalise(
                    value, mark, tl.load(repetition + lane), tl.load(presence + lane), tl.load(frequency + lane)
                )
            value = tl.where(early & (mark < 0), _LOWEST, value)
        if MASKED:
            word = tl.load(words + mask * words_stride + token // 32, mask=inside & (mask >= 0), other=-1)
            value = tl.where(((word >> (token % 32)) & 1) != 0, value, _LOWEST)
        if (wanted & _BIASES) != 0:
            value = value + tl.load(bias + lane * table_stride + token, mask=inside, other=0.0)
        tl.store(logits + row * stride + column, value, mask=inside)


@triton.jit
def _penalise(value, mark, repetition, presence, frequency):
    counts = (mark & _OCCURRENCES).to(tl.float32)
    scaled = tl.where(value > 0, tl.div_rn(value, repetition + tl.zeros_like(value)), value * repetition)
    value = tl.where((mark & _SEEN) != 0, scaled, value)
    return value - (frequency * counts + presence * (counts > 0).to(tl.float32))


@triton.jit(do_not_specialize=["outcomes_stride"])
def _count(
    marks,
    stride,
    edits,
    seats,
    outcomes,
    outcomes_stride,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    seat = tl.program_id(0)
    lane = tl.load(seats + seat).to(tl.int64)
    if (tl.load(edits + lane) & _PENALISES) != 0:
        step = tl.arange(0, STEPS)
        new = step <= tl.load(outcomes + seat * outcomes_stride)
        token = tl.load(outcomes + seat * outcomes_stride + 2 + step, mask=new, other=0)
        tl.atomic_add(marks + lane * stride + token, 1, mask=new)
