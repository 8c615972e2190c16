"""How a product is cut into programs: what fixes its bits, by the matrix alone, and what only its speed.

Numbers were measured on an H200. A program per processor reads deep; where several share one, each holds less.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton

from paceline.kernels.cuda.formats import CHANNEL, FLOAT, FLOAT8

FEW_ROWS = 64  # up to here the matrix is read at memory speed
UNIT = 256  # parts of K are multiples of it
OUTPUTS = 64  # of a tile
PROCESSORS = 132  # multiprocessors that parts are chosen for; another device works, perhaps less evenly
STEPS = {  # (at most 16 rows, gated) → inputs a step and stages, by how many programs share a processor
    (True, True): ((128, 4), (128, 4), (128, 3), (128, 4)),
    (True, False): ((256, 3), (128, 4), (64, 4), (128, 4)),
    (False, True): ((128, 4), (128, 4), (64, 4), (64, 4)),
    (False, False): ((128, 5), (128, 3), (64, 4), (128, 3)),
}


def parts_of(outputs: int, inputs: int, *, gated: bool) -> int:
    """Into how many ranges K is divided: the least that keeps the processors evenly busy."""
    if gated:
        return 1
    fills = {}
    for parts in (1, 2, 3, 4):
        share = triton.cdiv(inputs, parts * UNIT) * UNIT
        programs = triton.cdiv(outputs, OUTPUTS) * parts
        if parts == 1 or (share >= 2 * UNIT and share * parts <= 1.1 * inputs):
            fills[parts] = programs / (triton.cdiv(programs, PROCESSORS) * PROCESSORS)
    enough = [parts for parts, fill in fills.items() if fill > 0.7]
    return enough[0] if enough else max(fills, key=lambda parts: fills[parts])


@dataclass(frozen=True, slots=True)
class Tiles:
    rows: int
    inputs: int  # a step along K
    stages: int
    outputs: int = OUTPUTS
    warps: int = 4
    descriptors: bool = False  # read tiles through the tensor copy engine

    @classmethod
    def of(cls, rows: int, *, gated: bool, programs: int, format: int, size: int) -> Tiles:
        """For `programs` tiles of OUTPUTS × all rows, and numbers of `size` bytes. As measured on an H200."""
        if format in (CHANNEL, FLOAT8):
            return cls(rows=_power(rows), inputs=128, stages=4)
        if format != FLOAT or size != 2:
            return cls(rows=_power(rows), inputs=64, stages=3)  # scales take room beside the weights
        if rows > FEW_ROWS:
            return cls(rows=128, inputs=64, stages=4, outputs=128, warps=8, descriptors=True)
        crowd = sum(programs > PROCESSORS * full for full in (1, 2, 8))  # programs share a processor from 1 on
        inputs, stages = STEPS[rows <= 16, gated][crowd]
        return cls(rows=_power(rows), inputs=inputs, stages=stages)


def _power(rows: int) -> int:
    return int(min(max(triton.next_power_of_2(rows), 16), FEW_ROWS))
