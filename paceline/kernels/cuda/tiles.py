"""The division of a product into programs. `parts_of` fixes its bits by the matrix alone; `Tiles` only its speed.

Constants were tuned on an H200 (docs/experiments.md, "Parts of narrow matrices", "Programs that fill the device
evenly", "A tile for each multiprocessor"). A program that has a multiprocessor alone prefetches more stages than
programs that share one.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton

from paceline.kernels.cuda.formats import CHANNEL, FLOAT, FLOAT8

FEW_ROWS = 64  # rows up to which a product takes as long as reading its matrix from memory
SPREAD_ROWS = 128  # rows up to which each part of a product has programs of its own
FEWER_ROWS = 16  # rows up to which tiles of fewer outputs are faster than the library
UNIT = 256  # inputs; a part of K is a multiple of it
OUTPUTS = 64  # outputs of a tile
PROCESSORS = 132  # multiprocessors of an H200, for which parts are chosen; others work, perhaps less evenly loaded
MOST = 0.7  # share of the multiprocessors that programs must have at least
LEAST_GATED = 96  # outputs of a gated tile, at least: it takes the memory of 128
HALF = 0.45  # share of the multiprocessors from which tiles of fewer outputs give most of them a program
LIBRARY_OUTPUTS = 128  # outputs of the tiles that cuBLAS chooses for LIBRARY_ROWS; they have 160 rows
LIBRARY_ROWS = range(257, 321)  # rows for which whole waves are computed apart; 320 were measured
# (at most 16 rows, gated) → (inputs of a step, stages) for at most 1, 2, 8 and more programs per multiprocessor
STEPS = {
    (True, True): ((128, 4), (128, 4), (128, 3), (128, 4)),
    (True, False): ((256, 3), (128, 4), (64, 4), (128, 4)),
    (False, True): ((128, 3), (128, 4), (64, 4), (64, 4)),
    (False, False): ((128, 5), (128, 3), (64, 4), (128, 3)),
}
# at most 16 rows → (inputs of a step, stages, outputs, warps) of 8-bit floats for at most 1, 2 and more programs per
# multiprocessor. Tiles of fewer than 64 outputs or 16 rows would have other bits: the compiler takes an instruction
# whose inputs it orders differently.
STEPS8 = {
    True: ((256, 6, 64, 4), (256, 4, 64, 4), (128, 4, 64, 4)),
    False: ((128, 6, 64, 8), (128, 4, 64, 4), (128, 4, 128, 8)),
}


def parts_of(outputs: int, inputs: int, *, gated: bool, floats: bool = True) -> int:
    """Choose the number of equal ranges of K: one if tiles give most multiprocessors a program, those of `floats` with
    fewer outputs; else the largest number that gives none two, or the smallest that gives most of them one, or the one
    with the most programs. The library computes equal ranges in one call."""
    tiles = triton.cdiv(outputs, OUTPUTS)
    if gated or tiles > (HALF if floats else MOST) * PROCESSORS:
        return 1
    even = [parts for parts in (2, 3, 4) if inputs % (parts * UNIT) == 0 and inputs // parts > UNIT]
    most = [parts for parts in even if tiles * parts > MOST * PROCESSORS]
    alone = [parts for parts in most if tiles * parts <= PROCESSORS]
    return max(alone or most[:1] or even, default=1)


def tiled_rows(outputs: int, parts: int, *, gated: bool) -> int:
    """Return the number of rows up to which tiles compute a product of floats."""
    return FEWER_ROWS if _halved(outputs, parts, gated) else FEW_ROWS


def _halved(outputs: int, parts: int, gated: bool) -> bool:
    return not gated and HALF < triton.cdiv(outputs, OUTPUTS) * parts / PROCESSORS < MOST


def whole_waves(outputs: int, rows: int) -> int:
    """Count the outputs whose tiles occupy all multiprocessors to the end, if the library should compute the others in
    a call of their own; 0: one call for all.

    After the last whole wave most multiprocessors would wait for a few large tiles; smaller ones end sooner."""
    wave = PROCESSORS * LIBRARY_OUTPUTS // 2  # a tile has half of the rows
    return outputs // wave * wave if rows in LIBRARY_ROWS and 0 < outputs % wave < wave // 2 else 0


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile sizes and launch options of a product."""

    rows: int
    inputs: int  # inputs of a step along K
    stages: int  # stages of the pipeline of loads
    outputs: int = OUTPUTS  # of a program; in memory and arithmetic it takes the next power of two
    warps: int = 4

    @classmethod
    def of(cls, rows: int, *, outputs: int, parts: int, gated: bool, format: int, size: int) -> Tiles:
        """Choose tiles for a matrix of `outputs` rows in `parts`, and activations of `size` bytes."""
        each = 2 * OUTPUTS if gated else OUTPUTS
        if format == CHANNEL:
            return cls(rows=_power(rows), inputs=128, stages=4)
        if format == FLOAT8 and size == 2:
            programs = triton.cdiv(outputs, OUTPUTS) * parts
            inputs, stages, each, warps = STEPS8[rows <= 16][sum(programs > PROCESSORS * full for full in (1, 2))]
            return cls(rows=_power(rows), inputs=inputs, stages=stages, outputs=each, warps=warps)
        if format == FLOAT8:
            return cls(rows=_power(rows), inputs=128, stages=3)
        if format != FLOAT or size != 2:
            return cls(rows=_power(rows), inputs=64, stages=3)  # scales need memory beside the weights
        programs = triton.cdiv(outputs, each) * parts
        if rows <= FEWER_ROWS and (even := cls._gated(outputs) if gated else cls._alone(outputs, parts)):
            return even
        if _halved(outputs, parts, gated):
            return cls(rows=32, inputs=128, stages=6)
        crowd = sum(programs > PROCESSORS * full for full in (1, 2, 8))  # column of STEPS
        inputs, stages = STEPS[rows <= 16, gated][crowd]
        return cls(rows=_power(rows), inputs=inputs, stages=stages, outputs=each)

    @classmethod
    def _alone(cls, outputs: int, parts: int) -> Tiles | None:
        """Give each multiprocessor one program of few rows. Two of this size do not fit: others would come after it.
        None: there are too few outputs or too many."""
        full = triton.cdiv(outputs, OUTPUTS)
        if not _halved(outputs, parts, False) and (parts > 1 or not MOST * PROCESSORS <= full <= PROCESSORS):
            return None
        each = 8 * triton.cdiv(outputs * parts, 8 * PROCESSORS)
        return cls(rows=16, inputs=256, stages=6 if each <= 32 else 4, outputs=each)

    @classmethod
    def _gated(cls, outputs: int) -> Tiles | None:
        """Fill the device in whole turns with gated programs of few rows, two at once on each multiprocessor. None:
        there are few outputs, or tiles would be too empty."""
        turns = triton.cdiv(outputs, 2 * OUTPUTS * 2 * PROCESSORS)
        each = 4 * triton.cdiv(outputs, 4 * 2 * PROCESSORS * turns)
        few = outputs <= 2 * OUTPUTS * PROCESSORS
        return None if few or each < LEAST_GATED else cls(rows=16, inputs=128, stages=3, outputs=each)


def _power(rows: int) -> int:
    return int(min(max(triton.next_power_of_2(rows), 16), FEW_ROWS))
