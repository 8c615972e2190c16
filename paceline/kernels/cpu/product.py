"""Rows times one packed matrix, with the kernels of a forward pass: a program of a single operation."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.base import PAGE_SIZE
from paceline.kernels.cpu.abi import TILE, Buffer, Epilogue, Pass, Shape
from paceline.kernels.cpu.build import Library
from paceline.kernels.cpu.kv import CpuKV
from paceline.kernels.cpu.pack import Pack, Packed
from paceline.kernels.cpu.program import Program


class Product:
    def __init__(self, library: Library, matrix: Packed, *, pack: Pack, threads: int) -> None:
        """`pack` owns the memory of the matrix."""
        shape = Shape(hidden=matrix.inputs, intermediate=matrix.inputs, heads=1, kv_heads=1, head_dim=TILE, layers=1)
        shape.vocab, shape.features, shape.pages, shape.positions = matrix.outputs, matrix.inputs, 1, PAGE_SIZE
        self._outputs = matrix.outputs
        self._program = Program(library, shape, pack=pack, kv=CpuKV(library, shape), threads=threads)
        self._program.linear([matrix], source=Buffer.FEATURES, epilogue=Epilogue.LOGITS)
        self._program.finish()
        self._row = torch.zeros((1, matrix.inputs))
        self._best = torch.empty(1, dtype=torch.int32)
        self._zeros, self._ends = torch.zeros(2, dtype=torch.int32), torch.tensor([0, 1, 1], dtype=torch.int32)
        self._adding = self._pass(1, self._zeros, self._ends, self._zeros)
        self._adding.features, self._adding.argmax = self._row.data_ptr(), self._best.data_ptr()
        self._adding.adds = 1

    def add(self, row: Tensor, logits: Tensor) -> int:
        """Add row float32 [1, inputs] times the matrix transposed to logits float32 [1, outputs], whose numbers are
        adjacent; return the place of the best of them. All rows may lack the same last inputs, which are zeros."""
        assert logits.is_contiguous(), "numbers of logits that are not adjacent"
        self._row[:, : row.shape[1]] = row
        self._adding.logits = logits.data_ptr()
        self._program.run(self._adding)
        return int(self._best[0])

    def __call__(self, rows: Tensor) -> Tensor:
        """Compute rows float32 [n, inputs] times the matrix transposed, as float32 [n, outputs]."""
        rows, count = rows.float().contiguous(), len(rows)
        out, best = torch.empty((count, self._outputs)), torch.empty(count, dtype=torch.int32)
        zeros, all_rows = torch.zeros(count + 1, dtype=torch.int32), torch.arange(count, dtype=torch.int32)
        ends = torch.tensor([0, count, 1], dtype=torch.int32)  # starts of the rows, then the base of their sequence
        pass_ = self._pass(count, zeros, ends, all_rows)
        pass_.features, pass_.logits, pass_.argmax = rows.data_ptr(), out.data_ptr(), best.data_ptr()
        self._program.run(pass_)
        return out

    def _pass(self, count: int, zeros: Tensor, ends: Tensor, rows: Tensor) -> Pass:
        """Make a pass of one sequence over `count` rows. `ends`: starts of the rows, then the base of the sequence."""
        made = Pass(rows=count, outs=count, sequences=1, table_width=1)
        made.tokens = made.positions = made.slots = made.page_table = zeros.data_ptr()
        made.row_starts, made.bases, made.logit_rows = ends.data_ptr(), ends[2:].data_ptr(), rows.data_ptr()
        return made
