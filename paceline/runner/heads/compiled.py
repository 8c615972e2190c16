"""An EAGLE-3 head as a compiled program: a whole draft is one C call, whatever its length.

A head has KV memory of its own. A head without an embedding uses the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, c_char, c_int32
from struct import Struct

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.base import PAGE_SIZE, Batch, KVMemory, Output
from paceline.kernels.cpu.abi import BEAM, Buffer, Epilogue, Order, Pass
from paceline.kernels.cpu.build import load_library
from paceline.kernels.cpu.kv import CpuKV
from paceline.kernels.cpu.pack import Pack
from paceline.kernels.cpu.pick import pick
from paceline.kernels.cpu.program import Program
from paceline.models.heads import EagleHead
from paceline.models.rope import layer_rope, rope_tables
from paceline.runner.forwards.compiled import CompiledForward, check_supported, point, shape_of
from paceline.runner.forwards.known_batches import KnownBatches
from paceline.runner.heads.head_pack import DOWN, EXACT, IDS, UP, fill_head, head_layout
from paceline.runner.heads.protocol import Tree, TreeRequest
from paceline.runner.heads.sketch import exact_outputs

WANTED = {  # field of the C structure `order`, in the order of memory: field of TreeRequest
    "limits": "limit",
    "top_k": "top_k",
    "min_confidence": "min_confidence",
    "level_prices": "level_price",
    "min_p": "min_p",
    "top_p": "top_p",
}


class CompiledHead:
    """Implements TreeHead for a head with quantised weights."""

    device: torch.device | str = "cpu"

    def __init__(
        self,
        head: EagleHead,
        target: CompiledForward,
        *,
        num_pages: int,
        max_context: int,
        threads: int | None = None,
        pack: Pack | None = None,
    ) -> None:
        """`pack` has the head's weights, and `head` may then be without data; None: it is packed here."""
        config = head.config
        check_supported(config.layer)
        self.threads = threads or target.threads
        if pack is None:
            pack = Pack(head_layout(head), threads=self.threads)
            fill_head(pack, head)
        self.ids = pack.vector(IDS).view(torch.int32)
        self._target = target  # keeps its embedding alive
        self._library = load_library()
        shape = shape_of(config.layer, pages=num_pages, positions=min(max_context, num_pages * PAGE_SIZE))
        shape.layers, shape.features = 1, 3 * config.target_hidden_size
        self.kv: KVMemory = CpuKV(self._library, shape)
        self._program = Program(self._library, shape, pack=pack, kv=self.kv, threads=self.threads)
        _assemble(head, pack, self._program, target, positions=shape.positions)
        self._program.finish()
        self._program.prefetch(target.program, self.ids)
        self._logits = torch.empty((0, len(self.ids)))
        self._views: dict[int, Output] = {}
        self._known = KnownBatches[DraftMemory]()

    @property
    def prefetched(self) -> int:
        """Drafts whose first pass was prefetched; for tests."""
        return self._program.prefetched

    def __call__(self, batch: Batch, *, features: Tensor | None = None, carry: Sequence[int] = ()) -> Output:
        rows = None if features is not None else np.array(carry, dtype=np.int32)
        output = self._output(len(batch.logit_rows))
        pass_ = Pass()
        point(pass_, batch, output)
        pass_.features = None if features is None else _address(features, batch)
        pass_.carry = None if rows is None else rows.ctypes.data
        self._program.run(pass_)
        return output

    def pick(self, logits: Tensor, inverse_temperatures: Tensor, keys: Tensor) -> Tensor:
        return pick(self._library, self.threads, logits, inverse_temperatures, keys, ids=self.ids)

    def draft(self, batch: Batch, features: Tensor, wanted: Sequence[TreeRequest], *, width: int) -> list[Tree]:
        longest = max(each.limit for each in wanted)
        memory = self._known.get(batch)
        if memory is None or not memory.fits(longest, width):
            output = self._output(BEAM * len(batch.bases))
            memory = self._known.put(batch, DraftMemory(batch, output, longest, width, ids=self.ids))
        memory.read_from(features)
        memory.write(wanted)
        self._program.run_draft(memory.pass_, memory.order)
        return memory.read()

    def _output(self, outs: int) -> Output:
        """Return memory for `outs` rows with logits. All sizes share the logits."""
        if outs > len(self._logits):
            self._logits, self._views = torch.empty((outs, len(self.ids))), {}
            self._known.clear()  # prepared structures point to the old memory
        if outs not in self._views:
            argmax = torch.empty(outs, dtype=torch.int32)
            self._views[outs] = Output(logits=self._logits[:outs], argmax=argmax)
        return self._views[outs]


class DraftMemory:
    """Memory of the drafts of one batch: the request of each sequence, and the trees that were drafted."""

    def __init__(self, batch: Batch, output: Output, longest: int, width: int, *, ids: Tensor) -> None:
        count = len(batch.bases)
        self._batch, self._count, self._longest, self._width = batch, count, longest, width
        self._features: Tensor | None = None
        self.pass_ = Pass()
        point(self.pass_, batch, output)
        # The fields of WANTED, each [count]: two of integers, four of floats; then row prices [count, longest].
        self._layout = Struct(f"={2 * count}i{(4 + longest) * count}f")
        self._asked = bytearray(self._layout.size)
        # counts [count] │ passes [count] │ tokens [count, longest] │ parents [count, longest]
        memory = (c_int32 * (count * (2 + 2 * longest)))()
        self._found = memoryview(memory).cast("B").cast("i")
        asked, found = addressof(c_char.from_buffer(self._asked)), addressof(memory)
        assert batch.seeds is not None, "drafts are drawn by the batch's seeds"
        assert batch.inverse_temperatures is not None, "drafts are drawn at the batch's temperatures"
        self.order = Order(
            ids=ids.data_ptr(),
            seeds=batch.seeds.data_ptr(),
            inverse_temperature=batch.inverse_temperatures.data_ptr(),
            **{name: asked + 4 * count * i for i, name in enumerate(WANTED)},
            row_prices=asked + 4 * count * len(WANTED),
            counts=found,
            passes=found + 4 * count,
            tokens=found + 4 * count * 2,
            parents=found + 4 * count * (2 + longest),
            longest=longest,
            vocab=len(ids),
            width=width,
        )

    def fits(self, longest: int, width: int) -> bool:
        """Return True if drafts of `longest` nodes and this width fit."""
        return longest <= self._longest and width == self._width

    def read_from(self, features: Tensor) -> None:
        """Let the first pass read `features`. Usually it is the same tensor as last time, and looking up
        its address, which costs microseconds, is skipped."""
        if features is not self._features:
            self._features, self.pass_.features = features, _address(features, self._batch)

    def write(self, wanted: Sequence[TreeRequest]) -> None:
        """Write the requests of all sequences, field by field in the order of WANTED, then their row prices."""
        if len(wanted) == 1:  # the usual case, without any loop
            [one] = wanted
            floors = one.min_confidence, one.level_price
            values: Sequence[float] = one.limit, one.top_k, *floors, one.min_p, one.top_p
        else:
            values = [getattr(each, name) for name in WANTED.values() for each in wanted]
        prices = [price for each in wanted for price in self._row_prices(each.row_prices)]
        self._layout.pack_into(self._asked, 0, *values, *prices)

    def _row_prices(self, given: tuple[float, ...]) -> Sequence[float]:
        """Return the prices of as many rows as a draft may have; rows behind the last given one cost as much as it."""
        missing = self._longest - len(given)
        return given[: self._longest] if missing <= 0 else [*given, *[given[-1] if given else 0.0] * missing]

    def read(self) -> list[Tree]:
        """Return the tree of each sequence."""
        found, count, longest = self._found.tolist(), self._count, self._longest
        starts = range(2 * count, count * (2 + longest), longest)
        to_parent = count * longest  # distance from a token to its parent
        return [
            Tree(found[start : start + size], found[start + to_parent : start + to_parent + size], passes)
            for start, size, passes in zip(starts, found[:count], found[count : 2 * count], strict=True)
        ]


def _address(features: Tensor, batch: Batch) -> int:
    assert features.is_contiguous(), "features of adjacent rows lie side by side"
    assert len(features) == len(batch.tokens), f"features of {len(features)} rows for {len(batch.tokens)}"
    return features.data_ptr()


def _assemble(head: EagleHead, pack: Pack, program: Program, target: CompiledForward, *, positions: int) -> None:
    """Add the operations of the head's one layer to the program."""
    config, eps = head.config, head.config.layer.norm_eps
    matrix, vector = pack.matrix, pack.vector
    tables = rope_tables(config.layer, *layer_rope(config.layer, 0), positions)
    gate = Epilogue.SILU_GATE if config.layer.activation == "silu" else Epilogue.GELU_GATE
    embedding = matrix("embed") if "embed" in pack else target.embedding
    # Hidden states stay in float: some dimensions are hundreds of times larger than the rest, which 8 bits would lose.
    program.linear([matrix("fc")], source=Buffer.FEATURES)
    norms = vector("embed_norm"), vector("hidden_norm")
    program.pair(embedding, *norms, epsilon=eps, replace_residual=config.norm_first)
    program.linear([matrix(name) for name in "qkv"], source=Buffer.PAIRED, target=Buffer.PROJECTED)
    program.rotate(0, *tables, scale=config.layer.head_dim**-0.5)
    program.attend(0, window=0)
    program.linear([matrix("o")], source=Buffer.ATTENDED, epilogue=Epilogue.ADD)
    program.linear(
        [matrix("gate"), matrix("up")],
        source=Buffer.RESIDUAL,
        target=Buffer.GATED,
        epilogue=gate,
        norm=vector("mlp_norm"),
        epsilon=eps,
    )
    program.linear([matrix("down")], source=Buffer.GATED, epilogue=Epilogue.ADD)
    norm = vector("norm")
    if UP in pack:
        norms, few = (torch.ones_like(norm), norm), exact_outputs(head.sketch)
        program.shortlist(matrix(DOWN), matrix(UP), matrix(EXACT), few=few, norms=norms, epsilon=eps)
    program.linear([matrix("head")], source=Buffer.RESIDUAL, epilogue=Epilogue.LOGITS, norm=norm, epsilon=eps)
