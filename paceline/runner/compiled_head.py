"""An EAGLE-3 head as a compiled program: a draft of several tokens is one call, whatever its length.

It has KV memory of its own and the target's embedding, where it brings none.
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
from paceline.kernels.cpu.pick import pick
from paceline.kernels.cpu.program import Packed, Program
from paceline.kernels.quant import Quantised, dequantise
from paceline.models.heads import EagleHead
from paceline.models.rope import layer_rope, rope_tables
from paceline.runner.compiled import CompiledForward, check_supported, point, shape_of
from paceline.runner.heads import Tree, Wanted
from paceline.runner.sketch import sketch

FLOORS = ("worth", "least", "min_p", "top_p")
ORDER = ("limits", "top_k", "min_confidence", "min_level_confidence", "min_p", "top_p")
MANY = 256  # batches that are known


class CompiledHead:
    """Implements TreeHead. The weights of `head` are quantised."""

    device: torch.device | str = "cpu"

    def __init__(
        self, head: EagleHead, target: CompiledForward, *, num_pages: int, max_context: int, threads: int | None = None
    ) -> None:
        config = head.config
        check_supported(config.layer)
        self.ids = head.ids.contiguous()
        self.threads = threads or target.threads
        self._target = target  # its embedding is used
        self._library = load_library()
        shape = shape_of(config.layer, pages=num_pages, positions=min(max_context, num_pages * PAGE_SIZE))
        shape.layers, shape.features = 1, 3 * config.target_hidden_size
        self.kv: KVMemory = CpuKV(self._library, shape)
        self._program = Program(self._library, shape, kv=self.kv, threads=self.threads)
        _assemble(head, self._program, target, positions=shape.positions)
        self._program.finish()
        self._program.prefetch(target.program, self.ids)
        self._logits = torch.empty((0, len(self.ids)))
        self._views: dict[int, Output] = {}
        self._known: dict[tuple[int, int], Drafts] = {}  # by the id of a batch and the width of drafts

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

    def draft(self, batch: Batch, features: Tensor, wanted: Sequence[Wanted], *, width: int) -> list[Tree]:
        longest = max(each.limit for each in wanted)
        known = self._known.get((id(batch), width))
        if known is None or known.longest < longest:
            known = self._prepare(batch, longest, width)
        known.read_from(features)
        known.write(wanted)
        self._program.run_draft(known.pass_, known.order)
        return known.read()

    def _prepare(self, batch: Batch, longest: int, width: int) -> Drafts:
        """What a draft reads and writes is kept, since batches come back: see CompiledForward."""
        output = self._output(BEAM * len(batch.bases))
        if len(self._known) == MANY:
            self._known.clear()
        drafts = self._known[id(batch), width] = Drafts(batch, output, longest, width, ids=self.ids)
        return drafts

    def _output(self, outs: int) -> Output:
        """Memory for the results, a view of it for each number of them."""
        if outs > len(self._logits):
            self._logits, self._views = torch.empty((outs, len(self.ids))), {}
            self._known.clear()  # they point to the memory before
        if outs not in self._views:
            argmax = torch.empty(outs, dtype=torch.int32)
            self._views[outs] = Output(logits=self._logits[:outs], argmax=argmax)
        return self._views[outs]


class Drafts:
    """The memory of drafts for the sequences of a batch: what is wanted, and what came of it."""

    def __init__(self, batch: Batch, output: Output, longest: int, width: int, *, ids: Tensor) -> None:
        count = len(batch.bases)
        self._count, self.longest = count, longest
        self.pass_ = Pass()
        point(self.pass_, batch, output)
        self._batch = batch  # whoever has its id is this one
        self._features: Tensor | None = None
        self._layout = Struct(f"={2 * count}i{4 * count}f")  # limits │ top_k │ worth │ least │ min_p │ top_p
        self._asked = bytearray(self._layout.size)
        memory = (c_int32 * (count * (1 + 2 * longest)))()  # counts │ tokens [count, longest] │ parents, the same
        self._found = memoryview(memory).cast("B").cast("i")
        asked, found = addressof(c_char.from_buffer(self._asked)), addressof(memory)
        assert batch.seeds is not None, "drafts are drawn by the batch's seeds"
        assert batch.warmths is not None, "and its temperatures"
        self.order = Order(
            ids=ids.data_ptr(),
            seeds=batch.seeds.data_ptr(),
            inverse_temperature=batch.warmths.data_ptr(),
            **{name: asked + 4 * count * i for i, name in enumerate(ORDER)},
            counts=found,
            tokens=found + 4 * count,
            parents=found + 4 * count * (1 + longest),
            longest=longest,
            vocab=len(ids),
            width=width,
        )

    def read_from(self, features: Tensor) -> None:
        """Mostly the same memory as the last time, and to look at it again is not for nothing."""
        if features is not self._features:
            self._features, self.pass_.features = features, _address(features, self._batch)

    def write(self, wanted: Sequence[Wanted]) -> None:
        if len(wanted) == 1:
            [one] = wanted
            values: Sequence[float] = one.limit, one.top_k, one.worth, one.least, one.min_p, one.top_p
        else:
            values = [getattr(each, name) for name in ("limit", "top_k", *FLOORS) for each in wanted]
        self._layout.pack_into(self._asked, 0, *values)

    def read(self) -> list[Tree]:
        """Of each sequence."""
        found, count, longest = self._found.tolist(), self._count, self.longest
        starts = range(count, count * (1 + longest), longest)
        beyond = count * longest  # from a token to its parent
        return [
            (found[start : start + size], found[start + beyond : start + beyond + size])
            for start, size in zip(starts, found[:count], strict=True)
        ]


def _address(features: Tensor, batch: Batch) -> int:
    assert features.is_contiguous(), "features of adjacent rows lie side by side"
    assert len(features) == len(batch.tokens), f"features of {len(features)} rows for {len(batch.tokens)}"
    return features.data_ptr()


def _assemble(head: EagleHead, program: Program, target: CompiledForward, *, positions: int) -> None:
    config, weights, eps = head.config, head.weights, head.config.layer.norm_eps

    def vector(name: str) -> Tensor:
        weight = weights[name]
        assert isinstance(weight, Tensor), f"{name} is quantised"
        return weight

    def packed(*names: str) -> list[Packed]:
        matrices = [weight for weight in (weights[name] for name in names) if isinstance(weight, Quantised)]
        assert len(matrices) == len(names), f"{names} are not quantised"
        return program.pack(*[(matrix, None) for matrix in matrices])

    def floats(name: str) -> Tensor:
        weight = weights[name]
        return weight if isinstance(weight, Tensor) else dequantise(weight)

    tables = rope_tables(config.layer, *layer_rope(config.layer, 0), positions)
    gate = Epilogue.SILU_GATE if config.layer.activation == "silu" else Epilogue.GELU_GATE
    embedding = packed("embed")[0] if "embed" in weights else target.embedding
    # Some dimensions of hidden states are hundreds of times larger than the rest: 8 bits would drown the others.
    program.linear([program.pack_half(floats("fc"))], source=Buffer.FEATURES)
    norms = vector("embed_norm"), vector("hidden_norm")
    program.pair(embedding, *norms, epsilon=eps, onwards=config.norm_first)
    qkv = [packed(name)[0] for name in "qkv"]
    program.linear(qkv, source=Buffer.PAIRED, target=Buffer.PROJECTED)
    program.rotate(0, *tables, scale=config.layer.head_dim**-0.5)
    program.attend(0, window=0)
    program.linear(packed("o"), source=Buffer.ATTENDED, epilogue=Epilogue.ADD)
    program.linear(
        packed("gate", "up"),
        source=Buffer.RESIDUAL,
        target=Buffer.GATED,
        epilogue=gate,
        norm=vector("mlp_norm"),
        epsilon=eps,
    )
    program.linear(packed("down"), source=Buffer.GATED, epilogue=Epilogue.ADD)
    norm, last = vector("norm"), floats("head")
    if (rough := sketch(last, norm, head.sketch)) is not None:
        [down], [up] = program.pack((rough.down, None)), program.pack((rough.up, None))
        norms = torch.ones_like(norm), norm
        program.shortlist(down, up, program.pack_rows(last), few=rough.few, norms=norms, epsilon=eps)
    program.linear(packed("head"), source=Buffer.RESIDUAL, epilogue=Epilogue.LOGITS, norm=norm, epsilon=eps)
