"""An EAGLE head as a compiled program: a whole draft is one C call, whatever its length.

`models.eagle_config` has the formulas. A head has KV memory of its own. A head without an embedding or an output layer
uses the target's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.base import PAGE_SIZE, Batch, KVMemory, Output
from paceline.kernels.cpu.abi import Buffer, Epilogue, Pass
from paceline.kernels.cpu.build import load_library
from paceline.kernels.cpu.kv import CpuKV
from paceline.kernels.cpu.pack import Pack, Packed
from paceline.kernels.cpu.pick import pick
from paceline.kernels.cpu.program import Program
from paceline.models.heads import EagleHead
from paceline.runner.forwards.compiled import Assembly, CompiledForward, check_supported, point, shape_of
from paceline.runner.heads.head_pack import IDS, fill_head, head_layout
from paceline.runner.heads.mask_row import MaskRow
from paceline.runner.heads.protocol import Tree, TreeRequest
from paceline.runner.heads.sketch import DOWN, EXACT, UP, exact_outputs
from paceline.runner.heads.trees import OF_HEAD, TreeProgram, address_of


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
        prefetch: bool = True,
    ) -> None:
        """`pack` has the head's weights, and `head` may then be without data; None: it is packed here. `prefetch`
        False: the target may be running, so that it learns of this head only when the head drafts."""
        config = head.config
        check_supported(config.decoder)
        self.threads = threads or target.threads
        if pack is None:
            pack = Pack(head_layout(head), threads=self.threads)
            fill_head(pack, head)
        self.ids = pack.vector(IDS).view(torch.int32)
        self._target = target  # keeps its embedding alive
        self._library = load_library()
        shape = shape_of(config.decoder, pages=num_pages, positions=min(max_context, num_pages * PAGE_SIZE))
        shape.features = config.width
        self.kv: KVMemory = CpuKV(self._library, shape)
        self._program = Program(self._library, shape, pack=pack, kv=self.kv, threads=self.threads)
        _assemble(head, pack, self._program, target, positions=shape.positions)
        self._program.finish()
        self.mask = MaskRow.of(head.config, pack.vector("mask") if "mask" in pack else None)
        self._link = object()  # stands for this head where the target says whose first passes it starts
        if prefetch and self.mask is None:  # the first pass of a P-EAGLE draft has rows that no target's pass ends with
            self._link_to_target()
        self._logits = torch.empty((0, len(self.ids)))
        self._views: dict[int, Output] = {}
        self._trees = TreeProgram(self._program, self.ids, OF_HEAD)

    @property
    def prefetched(self) -> int:
        """Drafts whose first pass was prefetched; for tests."""
        return self._program.prefetched

    def __call__(self, batch: Batch, *, features: Tensor | None = None, carry: Sequence[int] = ()) -> Output:
        if features is None and self.mask is not None:
            batch, features = self.mask.rows(batch)
        rows = None if features is not None else np.array(carry, dtype=np.int32)
        output = self._output(len(batch.logit_rows))
        pass_ = Pass()
        point(pass_, batch, output)
        pass_.features = None if features is None else address_of(features, batch)
        pass_.carry = None if rows is None else rows.ctypes.data
        self._program.run(pass_)
        return output

    def pick(self, logits: Tensor, inverse_temperatures: Tensor, keys: Tensor) -> Tensor:
        return pick(self._library, self.threads, logits, inverse_temperatures, keys, ids=self.ids)

    def draft(self, batch: Batch, features: Tensor | None, wanted: Sequence[TreeRequest], *, width: int) -> list[Tree]:
        assert self.mask is None, "a P-EAGLE head drafts chains, in one pass"
        if self._target.prefetching is not self._link:  # of several heads, the one that drafted last is prefetched
            self._link_to_target()
        return self._trees.draft(batch, features, wanted, width=width)

    def _link_to_target(self) -> None:
        """Let the target start the first passes of this head's drafts. The target must not be running."""
        self._program.prefetch(self._target.program, self.ids)
        self._target.prefetching = self._link

    def _output(self, outs: int) -> Output:
        """Return memory for `outs` rows with logits. All sizes share the logits."""
        if outs > len(self._logits):
            self._logits, self._views = torch.empty((outs, len(self.ids))), {}
        if outs not in self._views:
            argmax = torch.empty(outs, dtype=torch.int32)
            self._views[outs] = Output(logits=self._logits[:outs], argmax=argmax)
        return self._views[outs]


def _assemble(head: EagleHead, pack: Pack, program: Program, target: CompiledForward, *, positions: int) -> None:
    """Add the operations of the head to the program."""
    config, eps = head.config, head.config.decoder.norm_eps
    matrix = pack.matrix
    norm = pack.vector("norm") if "norm" in pack else None
    _begin(head, pack, program, embedding=matrix("embed") if "embed" in pack else target.embedding)
    layers = Assembly(config.decoder, pack, program, positions=positions, ropes={})
    layers.layer(0, source=Buffer.RESIDUAL if config.fuses_tokens else Buffer.PAIRED, normed=config.usual_layers)
    for index in range(1, config.decoder.num_layers):
        layers.layer(index)
    if UP in pack:
        ones = torch.ones(config.decoder.hidden_size)
        norms, few = (ones, ones if norm is None else norm), exact_outputs(head.sketch)
        program.shortlist(matrix(DOWN), matrix(UP), matrix(EXACT), few=few, norms=norms, epsilon=eps)
    output = matrix("head") if "head" in pack else target.output
    program.linear([output], source=Buffer.RESIDUAL, epilogue=Epilogue.LOGITS, norm=norm, epsilon=eps)


def _begin(head: EagleHead, pack: Pack, program: Program, *, embedding: Packed) -> None:
    """Add the operations up to the first layer: states and tokens to its inputs."""
    config, eps, vector = head.config, head.config.decoder.norm_eps, pack.vector
    hidden, width = config.decoder.hidden_size, config.width
    # Hidden states stay in float: some dimensions are hundreds of times larger than the rest, which 8 bits would lose.
    source = Buffer.FEATURES
    if config.feature_norms:
        columns, source = width // config.feature_norms, Buffer.NORMED
        program.norm(Buffer.FEATURES, source, vector("fc_norm"), columns=columns, epsilon=eps)
    if config.fuses_tokens:
        program.norm(source, Buffer.RESIDUAL, None, columns=width)
    else:
        program.linear([pack.matrix("fc")], source=source)
    if config.norm_output:
        program.norm(Buffer.RESIDUAL, Buffer.RESIDUAL, vector("norm"), columns=hidden, epsilon=eps)
    norms = (None, None) if config.state_norm is None else (vector("embed_norm"), vector(config.state_norm))
    program.pair(embedding, *norms, epsilon=eps, replace_residual=config.norm_first)
    if config.fuses_tokens:
        program.linear([pack.matrix("fc")], source=Buffer.PAIRED)
