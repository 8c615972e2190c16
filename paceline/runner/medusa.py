"""Medusa heads that run: from the target's last hidden state to what each head says of its own position.

In torch on any device, or compiled, one program a head. They have no keys, values or positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from paceline.kernels.base import Batch, Output
from paceline.kernels.cpu.abi import Buffer, Epilogue, Pass, Shape
from paceline.kernels.cpu.build import load_library
from paceline.kernels.cpu.pool import default_threads
from paceline.kernels.cpu.program import Program
from paceline.kernels.quant import Quantised
from paceline.kernels.reference import linear
from paceline.models.decoder import place
from paceline.models.heads import MedusaHead
from paceline.runner.compiled import point


class MedusaForward(Protocol):
    depth: int  # heads
    device: torch.device | str  # where features are wanted

    def __call__(self, features: Tensor) -> Tensor:
        """Logits float32 [heads, n, vocab], on the host, for hidden states [n, hidden]; the next call reuses them."""


class EagerMedusa:
    """Implements MedusaForward."""

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
        states = features.to(device=self.device, dtype=self._dtype)
        return torch.stack([self._logits(head, states) for head in self._heads]).cpu()

    def _logits(self, head: MedusaHead, x: Tensor) -> Tensor:
        for weight, bias in head.blocks:
            x = x + functional.silu(linear(x, weight, bias))
        return linear(x, head.head).float()


class CompiledMedusa:
    """Implements MedusaForward. The weights of the heads are quantised."""

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
        # No attention: of all that has to do with positions, as little as can be.
        shape = Shape(hidden=self._hidden, intermediate=0, heads=1, kv_heads=1, head_dim=16, vocab=1, layers=0)
        shape.pages, shape.positions, shape.features = 1, 1, self._hidden
        program = Program(load_library(), shape, kv=None, threads=threads)
        source, others = Buffer.FEATURES, (Buffer.RESIDUAL, Buffer.BRANCH)
        for index, (weight, bias) in enumerate(head.blocks):
            assert isinstance(weight, Quantised), "a block is not quantised"
            target = others[index % 2]
            packed = program.pack((weight, bias))
            program.linear(packed, source=source, target=target, epilogue=Epilogue.ADD_SILU)
            source = target
        assert isinstance(head.head, Quantised), "a head is not quantised"
        program.linear(program.pack((head.head, None)), source=source, epilogue=Epilogue.LOGITS)
        program.finish()
        return program


def _matrix(head: MedusaHead) -> Tensor:
    assert isinstance(head.head, Quantised), "a head is not quantised"
    return head.head.q


def _rows(count: int) -> Batch:
    """Rows that are nowhere."""
    zeros = torch.zeros(count, dtype=torch.int32)
    ends = torch.tensor([0, count], dtype=torch.int32)
    every = torch.arange(count, dtype=torch.int32)
    return Batch(zeros, zeros, zeros, ends, ends[1:], torch.zeros((1, 1), dtype=torch.int32), every)
