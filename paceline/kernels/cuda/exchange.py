"""Sums and logits over the ranks of a split model, inside a pass: ranks write their parts to each other's memory.

A program meets the program of the same number on every other rank. It writes its part to a slot in each rank's memory,
counts the meeting there, waits until all ranks have counted, and reads the parts from its own memory:

    slots    float32 [2, ranks, programs, width]     of the meeting's parity, the writer and the program
    counts   int32 [ranks, programs]                 meetings that the writer has come to

Two halves of slots are enough: a rank that writes to a half again has met all others since, so they have read it.
Parts are added in a binary tree, first the shards of a rank, then the ranks, so that all ranks hold the same bits, and
a row's sum depends on nothing but its parts. There is no barrier over the device: programs run in order, so the first
ones that have not met run on every rank.

A rank that does not come is given up after a time. From then on nobody waits, and results mean nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.cuda.many import added
from paceline.kernels.cuda.norm import launch_options, warps_of

MAX_RANKS = 8
PROGRAMS = 1024  # that meet in one launch, at most
SLOT_BYTES = 256 << 20  # memory of a rank's slots, at most
MUTED, LOST = 0, 1  # places in `Peers.status`


@dataclass(frozen=True, slots=True)
class Peers:
    """The memory in which ranks meet, as one of them sees it."""

    rank: int
    slots: tuple[Tensor, ...]  # of every rank, float32 [2, ranks, programs, width]
    counts: tuple[Tensor, ...]  # of every rank, int32 [ranks, programs]
    met: Tensor  # int32 [programs] meetings of each program of this rank
    status: Tensor  # int32 [2]: programs meet nobody, as in rehearsals; a rank was given up
    seconds: float  # time after which a rank that does not come is given up

    @property
    def ranks(self) -> int:
        return len(self.slots)

    @property
    def programs(self) -> int:
        return self.slots[0].shape[2]

    @property
    def width(self) -> int:
        return self.slots[0].shape[3]

    @staticmethod
    def shape(ranks: int, hidden: int) -> tuple[int, int, int, int]:
        """Return the shape of the slots of a model."""
        width = triton.next_power_of_2(hidden)
        return 2, ranks, min(PROGRAMS, SLOT_BYTES // (2 * ranks * width * 4)), width

    @classmethod
    def alone(cls, hidden: int, device: torch.device | str) -> Peers:
        """Return what a rank without others has: it meets nobody, and takes little memory."""
        _, _, programs, width = cls.shape(1, hidden)
        none = torch.zeros((2, 1, 1, 1), dtype=torch.float32, device=device).expand(2, 1, programs, width)
        few = torch.zeros((1, 2), dtype=torch.int32, device=device)
        return cls(rank=0, slots=(none,), counts=(few,), met=few[0], status=few[0].clone(), seconds=0.0)

    @property
    def _arguments(self) -> tuple[Any, ...]:
        return self.slots, self.counts, self.met, self.status, round(self.seconds * 1e9)

    def _options(self, pdl: bool) -> dict[str, Any]:
        return {
            "RANK": self.rank,
            "RANKS": self.ranks,
            "PROGRAMS": self.programs,
            "WIDTH": self.width,
            "TIMED": self.met.is_cuda,
            "PDL": pdl,
            "num_warps": warps_of(self.width),
            **launch_options(pdl),
        }

    def add_norm(
        self,
        parts: Tensor,  # float32 [shards of this rank, rows, hidden]
        bias: Tensor | None,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        *,
        eps: float,
        pdl: bool = False,
    ) -> None:
        """Compute x += sum of the parts of all ranks + bias, in place, then out = rms_norm(x) · weight."""
        self._add(parts, bias, x, weight, out, eps=eps, finished=True, pdl=pdl)

    def add(self, parts: Tensor, bias: Tensor | None, out: Tensor, *, pdl: bool = False) -> None:
        """Compute out [rows, hidden] = sum of the parts of all ranks + bias."""
        self._add(parts, bias, out, out, out, eps=0.0, finished=False, pdl=pdl)

    def _add(
        self,
        parts: Tensor,
        bias: Tensor | None,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        *,
        eps: float,
        finished: bool,
        pdl: bool,
    ) -> None:
        shards, rows, hidden = parts.shape
        for first in range(0, rows, self.programs):
            _add[(min(rows - first, self.programs),)](
                parts,
                weight if bias is None else bias,
                x,
                weight,
                out,
                first,
                rows * hidden,
                hidden,
                eps,
                *self._arguments,
                SHARDS=shards,
                BIAS=bias is not None,
                FINISHED=finished,
                **self._options(pdl),
            )

    def gather(self, part: Tensor, out: Tensor, *, pdl: bool = False) -> None:
        """Set out float32 [rows, columns] to the columns of all ranks, of which `part` [rows, …] has this rank's."""
        (rows, own), columns = part.shape, out.shape[1]
        pieces = triton.cdiv(triton.cdiv(columns, self.ranks), self.width)  # of a row
        for first in range(0, rows * pieces, self.programs):
            _gather[(min(rows * pieces - first, self.programs),)](
                part,
                out,
                first,
                pieces,
                own,
                columns,
                *self._arguments,
                **self._options(pdl),
            )


@triton.jit
def _pair(memory, step, k, known, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Add parts FIRST and FIRST + 1, as far as there are so many. They may have just been written by other ranks."""
    value = tl.load(memory + FIRST * step + k, mask=known, other=0.0, volatile=True)
    if FIRST + 1 < COUNT:
        value += tl.load(memory + (FIRST + 1) * step + k, mask=known, other=0.0, volatile=True)
    return value


@triton.jit
def _tree(memory, step, k, known, COUNT: tl.constexpr):
    """Add up to 8 parts, `step` elements apart, in a binary tree: neighbours first."""
    total = _pair(memory, step, k, known, 0, COUNT)
    if COUNT > 2:
        total += _pair(memory, step, k, known, 2, COUNT)
    if COUNT > 4:
        other = _pair(memory, step, k, known, 4, COUNT)
        if COUNT > 6:
            other += _pair(memory, step, k, known, 6, COUNT)
        total += other
    return total


@triton.jit
def _waits(count, meeting, status, began, limit, TIMED: tl.constexpr):
    """Return whether a rank has not come to a meeting yet, and is worth waiting for. Differences are right also once
    numbers of meetings have passed 2^31."""
    late = tl.atomic_add(count, 0, sem="acquire", scope="sys") - meeting < 0
    if TIMED:  # a constant of the kernel: the interpreter has no timer
        gone = late & (tl.extra.cuda.globaltimer() - began > limit)
        tl.store(status + 1, 1, mask=gone)
    return late & (tl.load(status + 1, volatile=True) == 0)


@triton.jit
def _meet(
    value,
    k,
    known,
    program,
    slots,
    counts,
    met,
    status,
    limit,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    TIMED: tl.constexpr,
):
    """Give a part [WIDTH] to all ranks, and wait for theirs. Return the place of rank 0's part in this rank's slots;
    those of the others follow PROGRAMS · WIDTH elements apart."""
    meeting = tl.load(met + program) + 1
    muted = tl.load(status) != 0
    half = (meeting & 1).to(tl.int64) * (RANKS * PROGRAMS * WIDTH) + program.to(tl.int64) * WIDTH
    for other in tl.static_range(RANKS):
        told = known
        if other != RANK:
            told = known & (not muted)
        tl.store(slots[other] + half + RANK * PROGRAMS * WIDTH + k, value, mask=told)
    tl.debug_barrier()  # all threads have written before one of them counts
    if not muted:
        for other in tl.static_range(RANKS):
            tl.atomic_xchg(counts[other] + RANK * PROGRAMS + program, meeting, sem="release", scope="sys")
        tl.store(met + program, meeting)
        began = tl.zeros((), tl.int64)
        if TIMED:
            began = tl.extra.cuda.globaltimer()
        for other in tl.static_range(RANKS):
            count = counts[RANK] + other * PROGRAMS + program
            while _waits(count, meeting, status, began, limit, TIMED):
                pass
    tl.debug_barrier()  # nobody reads before the one that waits has seen all
    return half


@triton.jit(do_not_specialize=["first"])
def _add(
    parts,
    bias,
    x,
    weight,
    out,
    first,  # row of the first program
    size,  # elements of a part: rows × hidden
    hidden,
    eps,
    slots,
    counts,
    met,
    status,
    limit,
    SHARDS: tl.constexpr,
    BIAS: tl.constexpr,
    FINISHED: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    TIMED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    k = tl.arange(0, WIDTH)
    known = k < hidden
    at = (first + program).to(tl.int64) * hidden + k
    total = _tree(parts, size, at, known, SHARDS)
    if RANKS > 1:
        place = _meet(total, k, known, program, slots, counts, met, status, limit, RANK, RANKS, PROGRAMS, WIDTH, TIMED)
        total = _tree(slots[RANK] + place, PROGRAMS * WIDTH, k, known, RANKS)
    if BIAS:
        total += tl.load(bias + k, mask=known, other=0.0)
    if FINISHED:
        value = added(total, tl.load(x + at, mask=known, other=0.0), x.dtype.element_ty).to(x.dtype.element_ty)
        tl.store(x + at, value, mask=known)
        wide = value.to(tl.float32)
        wide *= tl.rsqrt(tl.sum(wide * wide) / hidden + eps)
        total = wide * tl.load(weight + k, mask=known, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=known)


@triton.jit(do_not_specialize=["first"])
def _gather(
    part,
    out,
    first,  # number of the first program's piece
    pieces,  # of a row
    own,  # columns of this rank
    columns,
    slots,
    counts,
    met,
    status,
    limit,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    TIMED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    piece = first + program
    row = (piece // pieces).to(tl.int64)
    k = tl.arange(0, WIDTH)
    inside = piece % pieces * WIDTH + k  # columns of each rank
    value = tl.load(part + row * own + inside, mask=inside < own, other=0.0)
    place = _meet(
        value, k, inside < own, program, slots, counts, met, status, limit, RANK, RANKS, PROGRAMS, WIDTH, TIMED
    )
    for other in tl.static_range(RANKS):
        start = (columns.to(tl.int64) * other) // RANKS
        known = inside < (columns.to(tl.int64) * (other + 1)) // RANKS - start
        theirs = tl.load(slots[RANK] + place + other * PROGRAMS * WIDTH + k, mask=known, other=0.0, volatile=True)
        tl.store(out + row * columns + start + inside, theirs, mask=known)
