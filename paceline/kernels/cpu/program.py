"""A forward pass as a list of operations: built once from Python, then run as one C call.

A program consists of linear layers, norms, rotation and attention; the runner decides which of them make a decoder. The
program owns, or holds a reference to, all memory that its operations point to.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor

from paceline.errors import NoAnswer, OutOfMemory
from paceline.kernels.cpu.abi import (
    Buffer,
    Draws,
    Epilogue,
    Matrix,
    Operation,
    OperationKind,
    Order,
    Pass,
    Shape,
    Status,
)
from paceline.kernels.cpu.build import Library
from paceline.kernels.cpu.pack import Pack, Packed
from paceline.kernels.cpu.pool import thread_pool

Fields = dict[str, float | int | None]  # fields of an Operation
PROBLEMS = {
    Status.BAD_TOKEN: "a token outside of the vocabulary",
    Status.BAD_POSITION: "a position outside of the context or of the draft",
    Status.BAD_SLOT: "a KV slot that does not exist",
    Status.BAD_PAGE: "a page table that is too short or names a page that does not exist",
    Status.BAD_ROWS: "rows that do not add up",
}
LOSSES = {Status.RANK_GONE: "another rank has gone", Status.RANK_SILENT: "another rank has not answered in time"}


class Program:
    """Operations in the order they run. Add them, `finish()` once, then `run` as often as needed."""

    def __init__(self, library: Library, shape: Shape, *, pack: Pack, kv: object, threads: int) -> None:
        """`pack` owns the memory of the weights, `kv` that of `shape.kv`. The program keeps both, since a prefetched
        pass may still use that memory after all other owners are gone."""
        self._library = library
        self._shape = shape
        self._pack = pack
        self._kv = kv
        self._pool = thread_pool(library, threads)
        self._operations: list[Operation] = []
        self._kept: list[Tensor] = []
        self._handle: int | None = None

    def embed(self, table: Packed, *, scale: float, first: int = 0) -> None:
        """residual ← table[token - first] * scale; zeros for a token that the table lacks"""
        self._add(OperationKind.EMBED, [table], {"scale": scale, "column": first})

    def linear(
        self,
        parts: Sequence[Packed],
        *,
        source: Buffer,
        target: Buffer = Buffer.RESIDUAL,
        epilogue: Epilogue = Epilogue.STORE,
        norm: Tensor | None = None,
        epsilon: float = 0.0,
    ) -> None:
        """target ← epilogue of (norm of) source times each part, side by side.

        Gates take two parts: activation(first) * second. ADD_SILU gives source + silu(product), and its target must not
        be its source. LOGITS go to the output of the pass."""
        assert len({part.inputs for part in parts}) == 1, "parts of one product share their inputs"
        gated = epilogue in (Epilogue.SILU_GATE, Epilogue.GELU_GATE)
        placed = list(parts) if gated else _side_by_side(parts)
        fields: Fields = {"norm": self._pointer(norm), "input": source, "output": target}
        self._add(OperationKind.LINEAR, placed, fields | {"epilogue": epilogue, "epsilon": epsilon})

    def part(self, matrix: Packed, *, source: Buffer, first: int, place: int) -> None:
        """branch[place] ← inputs `first` and those after it of source times a matrix"""
        placed = replace(matrix, column=place * matrix.outputs)
        fields: Fields = {"input": source, "output": Buffer.BRANCH, "epilogue": Epilogue.STORE, "column": first}
        self._add(OperationKind.LINEAR, [placed], fields)

    def sum(self, source: Buffer, target: Buffer, *, parts: int, epilogue: Epilogue) -> None:
        """target ← or, with the epilogue ADD, target + the sum of `parts` parts of source, on all ranks together"""
        fields: Fields = {"input": source, "output": target, "epilogue": epilogue, "column": parts}
        self._add(OperationKind.SUM, [], fields)

    def rotate(
        self,
        layer: int,
        cosine: Tensor,
        sine: Tensor,
        *,
        scale: float,
        norms: tuple[Tensor, Tensor] | None = None,
        epsilon: float = 0.0,
    ) -> None:
        """Norm (if given) and rotate the projected queries and keys, scale the queries, and store keys and values."""
        query_norm, key_norm = norms or (None, None)
        assert min(len(cosine), len(sine)) >= self._shape.positions, "a rotary table shorter than the context"
        fields: Fields = {"cosine": self._pointer(cosine), "sine": self._pointer(sine)}
        fields |= {"norm": self._pointer(query_norm), "key_norm": self._pointer(key_norm)}
        self._add(OperationKind.ROTATE, [], fields | {"layer": layer, "scale": scale, "epsilon": epsilon})

    def attend(self, layer: int, *, window: int, causal: bool = True) -> None:
        """attended ← attention of the projected queries over their pages; window 0: no window. Where it is not
        `causal`, the `lasts` of a pass may let rows see later ones."""
        self._add(OperationKind.ATTEND, [], {"layer": layer, "window": window, "column": int(causal)})

    def convolve(self, buffer: Buffer, kernels: Tensor, *, group: int, deltas: int, add: bool = False) -> None:
        """buffer ← its convolution over the rows of each sequence, or residual ← residual + that, to `add` it.

        `kernels` [taps, hidden]; `deltas`: the first column in DELTAS of what is added to them, one number for `group`
        columns."""
        fields: Fields = {"input": buffer, "output": Buffer.RESIDUAL if add else buffer, "norm": self._pointer(kernels)}
        fields |= {"taps": len(kernels), "group": group, "column": deltas}
        self._add(OperationKind.CONVOLVE, [], fields)

    def add_norm(self, norm: Tensor, *, epsilon: float) -> None:
        """residual ← residual + norm of branch"""
        self._add(OperationKind.ADD_NORM, [], {"norm": self._pointer(norm), "epsilon": epsilon})

    def keep(self, column: int, *, norm: Tensor | None = None, epsilon: float = 0.0) -> None:
        """features[column …] ← residual, or its norm"""
        fields: Fields = {"column": column, "norm": self._pointer(norm), "epsilon": epsilon}
        self._add(OperationKind.KEEP, [], fields | {"output": Buffer.FEATURES})

    def keep_states(self, norm: Tensor, *, epsilon: float) -> None:
        """states ← norm of residual"""
        fields: Fields = {"norm": self._pointer(norm), "epsilon": epsilon}
        self._add(OperationKind.KEEP, [], fields | {"output": Buffer.STATES})

    def norm(
        self, source: Buffer, target: Buffer, weight: Tensor | None, *, columns: int, epsilon: float = 0.0
    ) -> None:
        """target ← norm of each `columns` columns of source, or source itself without a weight.

        From FEATURES, only for rows that have some; from RESIDUAL, only for rows that continue from the last pass."""
        fields: Fields = {"norm": self._pointer(weight), "column": columns, "epsilon": epsilon}
        self._add(OperationKind.NORM, [], fields | {"input": source, "output": target})

    def pair(
        self,
        table: Packed,
        norm: Tensor | None,
        hidden_norm: Tensor | None,
        *,
        epsilon: float,
        replace_residual: bool = False,
    ) -> None:
        """paired ← norm of table[token] │ norm of residual, each itself without a norm; `replace_residual`: residual ←
        its norm"""
        norms: Fields = {"norm": self._pointer(norm), "key_norm": self._pointer(hidden_norm), "epsilon": epsilon}
        self._add(
            OperationKind.PAIR, [table], norms | {"output": Buffer.RESIDUAL if replace_residual else Buffer.PAIRED}
        )

    def shortlist(
        self, down: Packed, up: Packed, exact: Packed, *, few: int, norms: tuple[Tensor, Tensor], epsilon: float
    ) -> None:
        """Let a draft compute only the outputs that may be among the best (docs/adr/0013).

        All outputs are computed roughly, through `down` and `up`. At least `few` of each slice are then computed
        exactly, by `exact` from `Layout.rows`. `norms`: the norm before `down`, and the norm before `exact`."""
        self.linear([down], source=Buffer.RESIDUAL, target=Buffer.SKETCHED, norm=norms[0], epsilon=epsilon)
        self.linear([up], source=Buffer.SKETCHED, epilogue=Epilogue.ROUGH)
        fields: Fields = {"norm": self._pointer(norms[1]), "epsilon": epsilon, "input": Buffer.SKETCHED}
        self._add(OperationKind.REFINE, [exact], fields | {"few": few})

    def finish(self) -> None:
        """Make the C program from the operations added so far."""
        operations = (Operation * len(self._operations))(*self._operations)
        arguments = (self._pool, byref(self._shape), byref(operations), len(operations))
        self._handle = self._library.paceline_program_new(*arguments)
        if not self._handle:
            raise OutOfMemory("no memory for the buffers of a forward pass")

    def run(self, pass_: Pass) -> None:
        """Run a pass."""
        if status := self._library.paceline_program_run(self._handle, byref(pass_)):
            self._refuse(status, pass_)

    def run_and_draw(self, pass_: Pass, draws: Draws) -> None:
        """Run a pass, then draw the token after each row with logits."""
        if status := self._library.paceline_program_draw(self._handle, byref(pass_), byref(draws)):
            self._refuse(status, pass_)

    def run_draft(self, pass_: Pass, order: Order) -> None:
        """Run the first pass of a draft, then one pass over the head's own output for every level of its tree."""
        if status := self._library.paceline_draft(self._handle, byref(pass_), byref(order)):
            self._refuse(status, pass_)

    def _refuse(self, status: int, pass_: Pass) -> NoReturn:
        if status in LOSSES:
            raise NoAnswer(LOSSES[Status(status)], silent=status == Status.RANK_SILENT)
        if status == Status.OUT_OF_MEMORY:
            raise OutOfMemory(f"no memory for a forward pass over {pass_.rows} rows; lower the token budget of a step")
        raise AssertionError(f"a batch with {PROBLEMS[Status(status)]}")

    def prefetch(self, target: Program, ids: Tensor) -> None:
        """Start the first pass of each draft as soon as the target has drawn its tokens. `ids` int32: the target's
        token of each output of this head."""
        self._ids = ids  # the C code reads them; a program may be linked many times
        self._library.paceline_prefetch(target._handle, self._handle, ids.data_ptr(), len(ids))

    @property
    def prefetched(self) -> int:
        """Prefetched passes that were asked for; for tests."""
        return int(self._library.paceline_prefetched(self._handle))

    def rows_of(self, matrix: Packed, rows: Tensor) -> Tensor:
        """Unpack rows int32 [n] of a matrix as float32 [n, inputs]."""
        out = torch.empty((len(rows), matrix.inputs))
        status = self._library.paceline_rows(byref(_matrix(matrix)), rows.data_ptr(), len(rows), out.data_ptr())
        assert status == 0, f"rows outside of a matrix of {matrix.outputs}"
        return out

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.paceline_program_free(self._handle)

    def _add(self, kind: OperationKind, parts: Sequence[Packed], fields: Fields) -> None:
        operation = Operation(kind=kind, parts=len(parts), **fields)
        for index, part in enumerate(parts):
            operation.part[index] = _matrix(part)
        self._operations.append(operation)

    def _keep(self, tensor: Tensor) -> Tensor:
        kept = tensor.detach().to(torch.float32).contiguous()
        self._kept.append(kept)
        return kept

    def _pointer(self, tensor: Tensor | None) -> int | None:
        return None if tensor is None else self._keep(tensor).data_ptr()


def _matrix(part: Packed) -> Matrix:
    bias = None if part.bias is None else part.bias.data_ptr()
    return Matrix(part.address, bias, part.stride, part.format, part.outputs, part.inputs, part.column)


def _side_by_side(parts: Sequence[Packed]) -> list[Packed]:
    """Place the outputs of each part behind those of the part before."""
    placed, column = [], 0
    for part in parts:
        placed.append(replace(part, column=column))
        column += part.outputs
    return placed
