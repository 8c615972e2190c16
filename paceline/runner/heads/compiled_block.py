"""A block drafter as two compiled programs: one reads the context, the other runs over blocks.

    context   features ─fc─▶ norm ─▶ keys and values of every layer, at their slots
    blocks    pages of the context, then pages of this drafter's own

               page table    context ...... p-1 │ p ...... p+B-1
               pages         the sequence's own │ scratch

A block begins inside the last page of its context where that has room; the rest of its rows are in scratch pages. What
it leaves in that last page is overwritten when the target's tokens are read. `models.block_config` has the formulas.
What tokens of DFlash2 are chosen among is found in torch (`runner.heads.selector`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.kernels.base import PAGE_SIZE, Batch, KVMemory, Output
from paceline.kernels.cpu.abi import Buffer, Epilogue, Pass
from paceline.kernels.cpu.build import load_library
from paceline.kernels.cpu.kv import CpuKV
from paceline.kernels.cpu.pack import Pack
from paceline.kernels.cpu.pick import pick
from paceline.kernels.cpu.product import Product
from paceline.kernels.cpu.program import Program
from paceline.kernels.quant import Weight
from paceline.models.block_config import BlockConfig, Convolutions
from paceline.models.block_heads import BlockHead, is_float
from paceline.runner.forwards.compiled import Assembly, CompiledForward, Ropes, check_supported, point, shape_of
from paceline.runner.heads.head_pack import fill, layout_of
from paceline.runner.heads.markov import MarkovRows
from paceline.runner.heads.protocol import Anchor, BlockRows
from paceline.runner.heads.selector import SelectedRows
from paceline.runner.heads.trees import address_of

MAX_BLOCKS = 16  # blocks of one pass, each with scratch pages


class CompiledBlock:
    """Implements BlockForward for a drafter with quantised weights."""

    device: torch.device | str = "cpu"

    def __init__(
        self,
        head: BlockHead,
        target: CompiledForward,
        *,
        num_pages: int,
        max_context: int,
        threads: int | None = None,
    ) -> None:
        check_supported(head.config.decoder)
        self.config, self.ids = head.config, head.ids
        self._threads = threads or target.threads
        self._target = target  # keeps its embedding and output layer alive
        self._library = load_library()
        packed = {name: weight for name, weight in head.weights.items() if name in _compiled(head)}
        self._floats = {name: weight for name, weight in head.weights.items() if name not in packed}
        self._pack = Pack(layout_of(packed), threads=self._threads)
        fill(self._pack, packed)
        self._scratch = num_pages  # first scratch page
        self._own_pages = -(-head.config.block_size // PAGE_SIZE) + 1  # of a block, wherever in a page it begins
        pages = num_pages + MAX_BLOCKS * self._own_pages
        context = min(max_context, num_pages * PAGE_SIZE)
        self._shape = shape_of(head.config.decoder, pages=pages, positions=context + head.config.block_size)
        self._shape.features = head.config.width
        self._memory = CpuKV(self._library, self._shape)
        self.kv: KVMemory = self._memory
        self._ropes: Ropes = {}
        self._context = self._reading_program()
        self._blocks = self._block_program()
        self._factors: _CompiledFactors | None = None
        if head.config.markov is not None:
            rank = head.config.markov.rank
            self._factors = _CompiledFactors(self._blocks, self._pack, rank=rank, threads=self._threads)

    def pick(self, logits: Tensor, inverse_temperatures: Tensor, keys: Tensor) -> Tensor:
        return pick(self._library, self._threads, logits, inverse_temperatures, keys, ids=self.ids)

    def probability(self, logits: Tensor, place: int) -> float:
        assert logits.dtype == torch.float32, f"logits of {logits.dtype}"
        assert logits.is_contiguous(), "numbers of logits that are not adjacent"
        return float(self._library.paceline_probability(logits.data_ptr(), logits.shape[1], place))

    # ── context ──

    def __call__(self, batch: Batch, *, features: Tensor) -> None:
        pass_ = Pass()
        point(pass_, batch, Output(torch.empty(0), torch.empty(0)))
        pass_.outs, pass_.features = 0, address_of(features, batch)
        self._context.run(pass_)

    def _reading_program(self) -> Program:
        """Make the program that turns features into keys and values. The queries that it makes, too, are not used."""
        program, layers = self._new_program()
        program.linear([self._pack.matrix("fc")], source=Buffer.FEATURES)
        for index in range(self.config.decoder.num_layers):
            layers.project(index, source=Buffer.RESIDUAL, norm=self._pack.vector("context_norm"))
        program.finish()
        return program

    def _new_program(self) -> tuple[Program, Assembly]:
        config = self.config
        program = Program(self._library, self._shape, pack=self._pack, kv=self._memory, threads=self._threads)
        causal = config.causal or (False,) * config.decoder.num_layers
        positions = self._shape.positions
        layers = Assembly(config.decoder, self._pack, program, positions=positions, ropes=self._ropes, causal=causal)
        if config.convolutions is None:
            return program, layers
        return program, _ConvolvedLayers(layers, config.convolutions, self._floats)

    # ── blocks ──

    def blocks(self, anchors: Sequence[Anchor]) -> list[BlockRows]:
        groups = [anchors[first : first + MAX_BLOCKS] for first in range(0, len(anchors), MAX_BLOCKS)]
        return [rows for group in groups for rows in self._some_blocks(group)]

    def _some_blocks(self, anchors: Sequence[Anchor]) -> list[BlockRows]:
        rows, first = self.config.rows_for(max(anchor.tokens for anchor in anchors)), 1 - self.config.anchor_first
        drafted = [block * rows + first + i for block, each in enumerate(anchors) for i in range(each.tokens)]
        parts = self._run(anchors, rows, drafted)
        if self.config.selector is not None:
            ids = self.ids.long()
            return [SelectedRows(self.config.selector, self._floats, *each[:2], ids) for each in parts]
        return [MarkovRows(self.config, self._floats, self._factors, *both) for both in parts]

    def _run(
        self, anchors: Sequence[Anchor], rows: int, drafted: Sequence[int]
    ) -> list[tuple[Tensor, Tensor, list[int]]]:
        """Run a pass; return of the `drafted` rows of each block the states after the last norm, the logits, and the
        best of them."""
        batch, count = self._batch(anchors, rows, drafted), len(drafted)
        states = torch.empty((len(batch.tokens), self.config.decoder.hidden_size))
        output = Output(torch.empty((count, len(self.ids))), torch.empty(count, dtype=torch.int32), states=states)
        lasts = torch.tensor([each.position + rows - 1 for each in anchors for _ in range(rows)], dtype=torch.int32)
        pass_ = Pass()
        point(pass_, batch, output)
        pass_.lasts = lasts.data_ptr()
        self._blocks.run(pass_)
        sizes, logits = [anchor.tokens for anchor in anchors], _scaled(output.logits, self.config)
        parts = [torch.split(each, sizes) for each in (states[drafted], logits, output.argmax)]
        return [(states, logits, best.tolist()) for states, logits, best in zip(*parts, strict=True)]

    def _batch(self, anchors: Sequence[Anchor], rows: int, drafted: Sequence[int]) -> Batch:
        count = len(anchors)
        tokens = torch.full((count, rows), self.config.mask_token, dtype=torch.int32)
        tokens[:, 0] = torch.tensor([anchor.token for anchor in anchors])
        starts = torch.tensor([anchor.position for anchor in anchors], dtype=torch.int32)
        positions = starts[:, None] + torch.arange(rows, dtype=torch.int32)
        tables = [self._pages(block, anchor) for block, anchor in enumerate(anchors)]
        width = max(map(len, tables))
        table = torch.tensor([pages + [0] * (width - len(pages)) for pages in tables], dtype=torch.int32)
        slots = table.gather(1, (positions // PAGE_SIZE).long()) * PAGE_SIZE + positions % PAGE_SIZE
        return Batch(
            tokens=tokens.flatten(),
            positions=positions.flatten(),
            slots=slots.flatten(),
            row_starts=torch.arange(0, count * rows + 1, rows, dtype=torch.int32),
            bases=starts + rows,
            page_table=table,
            logit_rows=torch.tensor(drafted, dtype=torch.int32),
        )

    def _pages(self, block: int, anchor: Anchor) -> list[int]:
        """Return the pages of a block's context, then those of its rows that have no room there."""
        first = self._scratch + block * self._own_pages
        return [*map(int, anchor.pages), *range(first, first + self._own_pages)]

    def _block_program(self) -> Program:
        config, eps = self.config, self.config.decoder.norm_eps
        program, layers = self._new_program()
        embedding = self._pack.matrix("embed") if "embed" in self._pack else self._target.embedding
        program.embed(embedding, scale=config.embedding_scale)
        for index in range(config.decoder.num_layers):
            layers.layer(index)
        norm = self._pack.vector("norm")
        program.keep_states(norm, epsilon=eps)
        output = self._pack.matrix("head") if "head" in self._pack else self._target.output
        program.linear([output], source=Buffer.RESIDUAL, epilogue=Epilogue.LOGITS, norm=norm, epsilon=eps)
        program.finish()
        return program


class _ConvolvedLayers(Assembly):
    """The operations of layers with convolutions around attention and MLP (`runner.heads.convolution`)."""

    def __init__(self, layers: Assembly, convolutions: Convolutions, floats: Mapping[str, Weight]) -> None:
        """`layers`: attention and MLP without convolutions. `floats`: kernels of both sides, [2 * taps, hidden]."""
        super().__init__(
            layers.config,
            layers.pack,
            layers.program,
            positions=layers.positions,
            ropes=layers.ropes,
            causal=layers.causal,
        )
        self._convolutions, self._floats = convolutions, floats

    def layer(self, index: int, *, source: Buffer = Buffer.RESIDUAL, normed: bool = True) -> None:
        of = f"layers.{index}."
        self._before(f"{of}attn")
        self.project(index, source=Buffer.CONVOLVED, norm=None)
        self.attend(index)
        self._after(f"{of}attn", f"{of}o", source=Buffer.ATTENDED)
        self._before(f"{of}mlp")
        self.gate(of, source=Buffer.CONVOLVED, norm=None)
        self._after(f"{of}mlp", f"{of}down", source=Buffer.GATED)

    def _before(self, name: str) -> None:
        """convolved ← convolution of the norm of the residual stream"""
        config, program, convolved = self.config, self.program, Buffer.CONVOLVED
        norm = self.pack.vector(f"{name}_norm")
        program.norm(Buffer.RESIDUAL, convolved, norm, columns=config.hidden_size, epsilon=config.norm_eps)
        program.linear([self.pack.matrix(f"{name}_conv.kernel")], source=convolved, target=Buffer.DELTAS)
        program.convolve(convolved, self._sides(name)[0], group=self._convolutions.group, deltas=0)

    def _after(self, name: str, matrix: str, *, source: Buffer) -> None:
        """residual ← residual + convolution of a product"""
        self.program.linear([self.pack.matrix(matrix)], source=source, target=Buffer.BRANCH)
        of = self._convolutions
        deltas = of.taps * (self.config.hidden_size // of.group)
        self.program.convolve(Buffer.BRANCH, self._sides(name)[1], group=of.group, deltas=deltas, add=True)

    def _sides(self, name: str) -> tuple[Tensor, Tensor]:
        base = self._floats[f"{name}_conv.base"]
        assert isinstance(base, Tensor), f"{name}_conv.base is quantised"
        before, after = torch.split(base, self._convolutions.taps)
        return before, after


class _CompiledFactors:
    """Implements Factors. The packed matrices may have more columns than the rank: zeros."""

    def __init__(self, program: Program, pack: Pack, *, rank: int, threads: int) -> None:
        self._program, self._rank = program, rank
        self._before = pack.matrix("markov.before")
        self._bias = Product(load_library(), pack.matrix("markov.after"), pack=pack, threads=threads)

    def before(self, token: int) -> Tensor:
        return self._program.rows_of(self._before, torch.tensor([token], dtype=torch.int32))[:, : self._rank]

    def biased(self, factor: Tensor, logits: Tensor) -> tuple[Tensor, int]:
        return logits, self._bias.add(factor, logits)


def _compiled(head: BlockHead) -> set[str]:
    """Name the weights that programs read; the others stay in floats."""
    return {name for name in head.weights if name == "fc" or not is_float(name.removesuffix(".bias"))}


def _scaled(logits: Tensor, config: BlockConfig) -> Tensor:
    logits = logits * config.logit_scale if config.logit_scale != 1.0 else logits
    return config.softcap * torch.tanh(logits / config.softcap) if config.softcap else logits
