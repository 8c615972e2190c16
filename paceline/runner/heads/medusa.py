"""Medusa heads that run: logits of every head from the target's last hidden state.

`TorchMedusa` runs on any device; `CompiledMedusa` is one C program for each head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from paceline.kernels.base import Batch, Output
from paceline.kernels.cpu.abi import Buffer, Epilogue, Pass, Shape
from paceline.kernels.cpu.build import load_library
from paceline.kernels.cpu.pack import Layout, Pack, lay_out
from paceline.kernels.cpu.pool import default_threads
from paceline.kernels.cpu.program import Program
from paceline.kernels.quant import Quantised
from paceline.kernels.reference import linear
from paceline.models.decoder import place
from paceline.models.heads import MedusaHead
from paceline.runner.forwards.compiled import point


class TorchMedusa:
    """Implements MedusaForward in plain torch."""

    def __init__(
        self,
        heads: Sequence[MedusaHead],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.depth, self.device = len(heads), device
        self._dtype = dtype
        self._heads = [
            MedusaHead(
                blocks=tuple(
                    (place(weight, dtype=dtype, device=device), bias.to(device)) for weight, bias in head.blocks
                ),
                head=place(head.head, dtype=dtype, device=device),
            )
            for head in heads
        ]

    @torch.inference_mode()
    def __call__(self, features: Tensor) -> Tensor:
        return self.on_device(features).cpu()

    def on_device(self, features: Tensor) -> Tensor:
        """Compute logits float32 [heads, n, vocab] that stay on the device."""
        states = features.to(device=self.device, dtype=self._dtype)
        return torch.stack([self._logits(head, states) for head in self._heads])

    def _logits(self, head: MedusaHead, x: Tensor) -> Tensor:
        for weight, bias in head.blocks:
            x = x + functional.silu(linear(x, weight, bias))
        return linear(x, head.head).float()


class CompiledMedusa:
    """Implements MedusaForward for heads with quantised weights."""

    device: torch.device | str = "cpu"

    def __init__(self, heads: Sequence[MedusaHead], *, threads: int | None = None) -> None:
        self.depth = len(heads)
        self._hidden, self._vocab = _matrix(heads[0]).shape[1], len(_matrix(heads[0]))
        self._programs = [self._assembled(head, threads or default_threads()) for head in heads]
        self._pass = Pass()
        self._logits = torch.empty((self.depth, 0, self._vocab))

    def __call__(self, features: Tensor) -> Tensor:
        rows = len(features)
        if rows != self._logits.shape[1]:
            self._logits = torch.empty((self.depth, rows, self._vocab))
        batch, argmax = _rows(rows), torch.empty(rows, dtype=torch.int32)
        states = features.contiguous()
        for program, logits in zip(self._programs, self._logits, strict=True):
            point(self._pass, batch, Output(logits=logits, argmax=argmax, features=states))
            program.run(self._pass)
        return self._logits

    def _assembled(self, head: MedusaHead, threads: int) -> Program:
        # There is no attention: sizes of heads, pages and positions are the smallest that are allowed.
        shape = Shape(hidden=self._hidden, intermediate=0, heads=1, kv_heads=1, head_dim=16, vocab=1, layers=0)
        shape.pages, shape.positions, shape.features = 1, 1, self._hidden
        pack = _packed(head, threads)
        program = Program(load_library(), shape, pack=pack, kv=None, threads=threads)
        source, others = Buffer.FEATURES, (Buffer.RESIDUAL, Buffer.BRANCH)
        for index in range(len(head.blocks)):
            target = others[index % 2]
            program.linear([pack.matrix(str(index))], source=source, target=target, epilogue=Epilogue.ADD_SILU)
            source = target
        program.linear([pack.matrix("head")], source=source, epilogue=Epilogue.LOGITS)
        program.finish()
        return program


def _packed(head: MedusaHead, threads: int) -> Pack:
    weights = {str(index): weight for index, (weight, _) in enumerate(head.blocks)} | {"head": head.head}
    biases = {f"{index}.bias": bias for index, (_, bias) in enumerate(head.blocks)}
    layout = Layout(load_library())
    for name, weight in weights.items():
        assert isinstance(weight, Quantised), f"{name} is not quantised"
        lay_out(layout, [(name, weight)])
    for name, bias in biases.items():
        layout.vector(name, len(bias))
    pack = Pack(layout, threads=threads)
    for name, weight in {**weights, **biases}.items():
        pack.write(name, weight)
    return pack


def _matrix(head: MedusaHead) -> Tensor:
    assert isinstance(head.head, Quantised), "a head is not quantised"
    return head.head.q


def _rows(count: int) -> Batch:
    """Make a batch of rows without tokens, positions or slots, with logits of every row."""
    zeros = torch.zeros(count, dtype=torch.int32)
    ends = torch.tensor([0, count], dtype=torch.int32)
    every = torch.arange(count, dtype=torch.int32)
    return Batch(zeros, zeros, zeros, ends, ends[1:], torch.zeros((1, 1), dtype=torch.int32), every)
