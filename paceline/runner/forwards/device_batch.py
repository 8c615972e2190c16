"""The rows of a pass on a CUDA device."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from paceline.kernels.cuda.tiles import FEW_ROWS, FEWER_ROWS


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """The rows of one pass, on the device. `seats`, `max_rows` and `max_context` bound the values of the tensors."""

    tokens: Tensor  # int32 [rows]
    positions: Tensor  # int32 [rows]
    slots: Tensor  # int32 [rows]
    row_starts: Tensor  # int32 [seats + 1]
    page_table: Tensor  # int32 [lanes or seats, pages]
    seats: int
    max_rows: int  # rows of one sequence
    max_context: int  # largest position + 1
    lanes: Tensor | None = None  # int32 [seats] rows of the page table; None: row b is seat b's
    bases: Tensor | None = None  # int32 [seats], see Batch
    tails: Tensor | None = None  # int32 [rows, depth], see Batch
    leads: Tensor | None = None  # int32 [rows], see kernels/tree_reference.py
    logit_rows: Tensor | None = None  # int64 [outs]
    lasts: Tensor | None = None  # int32 [rows] last position that each row attends to; None: its own


@dataclass(frozen=True, slots=True)
class Ends:
    """The rows of a pass whose outcome is wanted: the last rows of some of its sequences, one after the other.

    The last layer computes keys and values of all rows, and all else of these only."""

    index: Tensor  # int64 [ends], of the pass's rows; those that belong to no seat pad
    row_starts: Tensor  # int32 [seats + 1]
    lanes: Tensor  # int32 [seats]
    seats: int
    max_rows: int  # rows of one sequence

    def of(self, rows: DeviceBatch) -> DeviceBatch:
        """Return these rows of a pass as a pass of their own."""
        return replace(
            rows,
            tokens=rows.tokens[self.index],
            positions=rows.positions[self.index],
            slots=rows.slots[self.index],
            row_starts=self.row_starts,
            lanes=self.lanes,
            seats=self.seats,
            max_rows=self.max_rows,
        )


def padded_sizes(most: int) -> list[int]:
    """List the sizes of passes over 17 to `most` rows: the largest, then powers of two, at which `Products` compares
    times, then the others."""
    sizes = {padded_rows(rows) for rows in range(FEWER_ROWS + 1, most + 1)}
    return sorted(sizes, key=lambda size: (size < max(sizes), size & (size - 1) != 0, -size))


def padded_rows(rows: int) -> int:
    """Round a number of rows up to one of few sizes: for each new size the results of cuBLAS must be checked."""
    if rows <= FEWER_ROWS:
        return rows
    power = 1 << (rows - 1).bit_length()
    step = max(FEW_ROWS, power // 8) if rows > FEW_ROWS else power
    return -(-rows // step) * step
