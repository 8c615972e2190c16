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
from paceline.kernels.cpu.layout import Buffer, Chain, Epilogue, Pass
from paceline.kernels.cpu.program import Packed, Program
from paceline.kernels.quant import Quantised, dequantise
from paceline.models.heads import EagleHead
from paceline.models.rope import layer_rope, rope_tables
from paceline.runner.compiled import CompiledForward, check_supported, point, shape_of
from paceline.runner.heads import Wanted


class CompiledHead:
    """Implements ChainingHead. The weights of `head` are quantised."""

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
        self._orders: dict[tuple[int, int], Order] = {}  # by sequences and the longest draft

    def __call__(self, batch: Batch, *, features: Tensor | None = None, carry: Sequence[int] = ()) -> Output:
        rows = np.array(carry, dtype=np.int32)
        output = self._point(batch, features, carry=None if features is not None else rows)
        self._program.run(self._pass)
        return output

    def pick(self, logits: Tensor, scales: Tensor, keys: Tensor) -> Tensor:
        return team.pick(self._library, self.threads, logits, scales, keys, ids=self.ids)

    def chain(self, batch: Batch, features: Tensor, wanted: Sequence[Wanted]) -> list[list[int]]:
        self._point(batch, features, carry=None)
        count, longest = len(wanted), max(each.limit for each in wanted)
        if (count, longest) not in self._orders:
            self._orders[count, longest] = Order(count, longest, self.ids)
        order = self._orders[count, longest]
        order.write(wanted)
        self._program.run_chain(self._pass, order.chain)
        return order.read()

    def _point(self, batch: Batch, features: Tensor | None, *, carry: np.ndarray | None) -> Output:
        output = self._output(len(batch.logit_rows))
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


class Order:
    """The memory of a chain for so many sequences: what is wanted, and what came of it."""

    def __init__(self, count: int, longest: int, ids: Tensor) -> None:
        self._count, self._longest = count, longest
        self._whole = np.zeros(
            count * (3 + longest), dtype=np.int32
        )  # limits │ top_k │ counts │ tokens [count, longest]
        self._floats = np.zeros(
            4 * count, dtype=np.float32
        )  # inverse temperatures │ beliefs at the end │ min_p │ top_p
        self._keys = np.zeros((count, longest, 2), dtype=np.uint32)
        at, floats = self._whole.ctypes.data, self._floats.ctypes.data
        self.chain = Chain(
            ids=ids.data_ptr(),
            limits=at,
            top_k=at + 4 * count,
            counts=at + 8 * count,
            tokens=at + 12 * count,
            inverse_temperature=floats,
            least=floats + 4 * count,
            min_p=floats + 8 * count,
            top_p=floats + 12 * count,
            keys=self._keys.ctypes.data,
            longest=longest,
            vocab=len(ids),
        )

    def write(self, wanted: Sequence[Wanted]) -> None:
        self._whole[: 2 * self._count] = [each.limit for each in wanted] + [each.top_k for each in wanted]
        self._floats[: 2 * self._count] = [each.inverse_temperature for each in wanted] + [
            each.least for each in wanted
        ]
        self._floats[2 * self._count :] = [each.min_p for each in wanted] + [each.top_p for each in wanted]
        for i, each in enumerate(wanted):
            if each.keys is not None:
                self._keys[i, : each.limit] = each.keys

    def read(self) -> list[list[int]]:
        """The tokens of each sequence."""
        found = self._whole.tolist()
        starts = range(3 * self._count, len(found), self._longest)
        return [found[start : start + found[2 * self._count + i]] for i, start in enumerate(starts)]


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
