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

    def __call__(self, rows: Tensor) -> Tensor:
        """Compute rows float32 [n, inputs] times the matrix transposed, as float32 [n, outputs]."""
        rows, count = rows.float().contiguous(), len(rows)
        out, best = torch.empty((count, self._outputs)), torch.empty(count, dtype=torch.int32)
        zeros, all_rows = torch.zeros(count + 1, dtype=torch.int32), torch.arange(count, dtype=torch.int32)
        ends = torch.tensor([0, count, 1], dtype=torch.int32)  # starts of the rows, then the base of their sequence
        pass_ = Pass(rows=count, outs=count, sequences=1, table_width=1)
        pass_.tokens = pass_.positions = pass_.slots = pass_.page_table = zeros.data_ptr()
        pass_.row_starts, pass_.bases, pass_.logit_rows = ends.data_ptr(), ends[2:].data_ptr(), all_rows.data_ptr()
        pass_.features, pass_.logits, pass_.argmax = rows.data_ptr(), out.data_ptr(), best.data_ptr()
        self._program.run(pass_)
        return out
