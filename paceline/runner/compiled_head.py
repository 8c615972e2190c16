"""An EAGLE-3 head as a compiled program: a draft of several tokens is one call, whatever its length.

It has KV memory of its own and the target's embedding, where it brings none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.base import PAGE_SIZE, Batch, KVMemory, Output
from paceline.kernels.cpu import team
from paceline.kernels.cpu.build import load_library
from paceline.kernels.cpu.kv import CpuKV
from paceline.kernels.cpu.layout import Buffer, Epilogue, Order, Pass
from paceline.kernels.cpu.program import Packed, Program
from paceline.kernels.quant import Quantised, dequantise
from paceline.models.heads import EagleHead
from paceline.models.rope import layer_rope, rope_tables
from paceline.runner.compiled import CompiledForward, check_supported, point, shape_of
from paceline.runner.heads import Tree, Wanted

BEAM = 4  # as in tree.c: rows of a sequence in one pass


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
        self._program = Program(self._library, shape, threads=self.threads)
        _assemble(head, self._program, target, positions=shape.positions)
        self._program.finish()
        self._pass = Pass()
        self._logits = torch.empty((0, len(self.ids)))
        self._views: dict[int, Output] = {}
        self._drafts: dict[tuple[int, int, int], DraftMemory] = {}  # by sequences, the longest draft and its width

    def __call__(self, batch: Batch, *, features: Tensor | None = None, carry: Sequence[int] = ()) -> Output:
        rows = np.array(carry, dtype=np.int32)
        output = self._point(batch, features, carry=None if features is not None else rows)
        self._program.run(self._pass)
        return output

    def pick(self, logits: Tensor, scales: Tensor, keys: Tensor) -> Tensor:
        return team.pick(self._library, self.threads, logits, scales, keys, ids=self.ids)

    def draft(self, batch: Batch, features: Tensor, wanted: Sequence[Wanted], *, width: int) -> list[Tree]:
        self._point(batch, features, carry=None, outs=BEAM * len(wanted))
        shape = len(wanted), max(each.limit for each in wanted), width
        if shape not in self._drafts:
            self._drafts[shape] = DraftMemory(*shape, ids=self.ids)
        memory = self._drafts[shape]
        memory.write(wanted)
        self._program.run_draft(self._pass, memory.order)
        return memory.read()

    def _point(
        self, batch: Batch, features: Tensor | None, *, carry: np.ndarray | None, outs: int | None = None
    ) -> Output:
        """Where results of so many rows may go: by default of those with logits."""
        output = self._output(outs or len(batch.logit_rows))
        point(self._pass, batch, output)
        if features is not None:
            assert features.is_contiguous(), "features of adjacent rows lie side by side"
            assert len(features) == len(batch.tokens), f"features of {len(features)} rows for {len(batch.tokens)}"
        self._pass.features = None if features is None else features.data_ptr()
        self._pass.carry = None if carry is None else carry.ctypes.data
        return output

    def _output(self, outs: int) -> Output:
        """Memory for the results, a view of it for each number of them."""
        if outs > len(self._logits):
            self._logits, self._views = torch.empty((outs, len(self.ids))), {}
        if outs not in self._views:
            argmax = torch.empty(outs, dtype=torch.int32)
            self._views[outs] = Output(logits=self._logits[:outs], argmax=argmax)
        return self._views[outs]


class DraftMemory:
    """The memory of a draft for so many sequences: what is wanted, and what came of it."""

    def __init__(self, count: int, longest: int, width: int, *, ids: Tensor) -> None:
        self._count, self._longest = count, longest
        # limits │ top_k │ counts │ tokens [count, longest] │ parents [count, longest]
        self._whole = np.zeros(count * (3 + 2 * longest), dtype=np.int32)
        # inverse temperatures │ worth │ least │ min_p │ top_p
        self._floats = np.zeros(5 * count, dtype=np.float32)
        self._keys = np.zeros((count, longest, 2), dtype=np.uint32)
        at, floats = self._whole.ctypes.data, self._floats.ctypes.data
        self.order = Order(
            ids=ids.data_ptr(),
            limits=at,
            top_k=at + 4 * count,
            counts=at + 8 * count,
            tokens=at + 12 * count,
            parents=at + (12 + 4 * longest) * count,
            inverse_temperature=floats,
            worth=floats + 4 * count,
            least=floats + 8 * count,
            min_p=floats + 12 * count,
            top_p=floats + 16 * count,
            keys=self._keys.ctypes.data,
            longest=longest,
            vocab=len(ids),
            width=width,
        )

    def write(self, wanted: Sequence[Wanted]) -> None:
        self._whole[: 2 * self._count] = [each.limit for each in wanted] + [each.top_k for each in wanted]
        floats: list[float] = []
        for name in ("inverse_temperature", "worth", "least", "min_p", "top_p"):
            floats += [getattr(each, name) for each in wanted]
        self._floats[:] = floats
        for i, each in enumerate(wanted):
            if each.keys is not None:
                self._keys[i, : each.limit] = each.keys

    def read(self) -> list[Tree]:
        """Of each sequence."""
        found, count, longest = self._whole.tolist(), self._count, self._longest
        trees = []
        for i in range(count):
            size, tokens, parents = found[2 * count + i], 3 * count + i * longest, 3 * count + (count + i) * longest
            trees.append((found[tokens : tokens + size], found[parents : parents + size]))
        return trees


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
    program.linear(packed("head"), source=Buffer.RESIDUAL, epilogue=Epilogue.LOGITS, norm=vector("norm"), epsilon=eps)
