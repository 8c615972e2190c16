"""A model as one compiled program: the Forward for quantised weights on a CPU.

It is bitwise reproducible: a row's logits, keys and values have the same bits for any other rows in the batch, any
number of threads, and any way in which its context was computed: by prefill, token by token, or by accepted drafts.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from ctypes import addressof, c_int32
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.errors import UnsupportedModel
from paceline.kernels.base import PAGE_SIZE, Batch, KVMemory, Output
from paceline.kernels.cpu.abi import HEAD_DIM_MAX, QUERY_BLOCK, TILE, Buffer, Draws, Epilogue, Pass, Shape
from paceline.kernels.cpu.build import Library, load_library
from paceline.kernels.cpu.kv import CpuKV, page_bytes
from paceline.kernels.cpu.pack import Layout, Pack, Packed
from paceline.kernels.cpu.pick import pick
from paceline.kernels.cpu.pool import default_threads
from paceline.kernels.cpu.product import Product
from paceline.kernels.cpu.program import Program
from paceline.kernels.quant import GROUP, Weight
from paceline.models.config import ModelConfig
from paceline.models.rope import layer_rope, rope_tables
from paceline.runner.forwards.decoder_pack import pack_decoder
from paceline.runner.forwards.known_batches import KnownBatches
from paceline.runner.forwards.measuring import RunPass
from paceline.runner.forwards.share import Share
from paceline.runner.forwards.thread_choice import choose_threads
from paceline.runner.heads.sketch import DOWN, EXACT, FITTED_EXACT_OUTPUTS, UP

Weights = MutableMapping[str, Weight]
Ropes = dict[object, tuple[Tensor, Tensor]]  # tables of rotations, by their parameters
TRIAL_ROWS = 4  # rows of a pass that chooses the number of threads: a token and a draft of three


class Prepared(NamedTuple):
    """The C structures of a batch, and the results that they point to."""

    pass_: Pass
    draws: Draws
    output: Output


class CompiledForward:
    """Implements Forward. `weights` are a pack, or are packed here; packing empties the mapping, so that a model is
    never in memory twice."""

    bitwise = True

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights | Pack,
        *,
        num_pages: int,
        threads: int | None = None,
        max_context: int | None = None,
        taps: Sequence[int] = (),
        beside: CompiledForward | None = None,
        share: Share | None = None,
    ) -> None:
        """`share`: the part of one rank; None: the program has all of the model.

        `beside`: the Forward whose KV memory this one shares; it may have more layers. Both need the same threads:
        a pass that runs on them cancels the other's prefetched one, so that two never write to the same slots."""
        check_supported(config)
        self.config = config
        self.vocab_size = config.vocab_size
        self.taps = taps
        self.prefetching: object | None = None  # the head whose first passes this program starts
        self.pack = (
            weights if isinstance(weights, Pack) else pack_decoder(weights, threads=threads or default_threads())
        )
        self._library = load_library()
        self.positions: int = min(max_context or config.max_context, num_pages * PAGE_SIZE)
        shape = shape_of(config, pages=num_pages, positions=self.positions)
        shape.features = len(taps) * config.hidden_size
        self._share = share
        if share is not None:
            shape.vocab = share.vocab_size
            shape.segment = share.segment.address if share.segment else None
        self.kv: KVMemory = _kv_memory(self._library, shape, beside)
        programs = Programs(config, self.pack, shape, self.kv, taps, library=self._library, share=share)
        self.thread_choice = choose_threads(threads, thread_question(config, self.pack.layout), programs.trial)
        self.threads = self.thread_choice.threads
        assert beside is None or beside.threads == self.threads, "programs on one KV memory share their threads"
        self.program = programs.build(self.threads)
        self.embedding = self.pack.matrix("embed")
        self.output = self.embedding if config.tied_head else self.pack.matrix("head")
        self._product: Product | None = None  # of the output layer, once `project` needs it
        self._features_width: int = shape.features
        self._hidden = config.hidden_size
        self._logits, self._features = torch.empty((0, self.vocab_size)), torch.empty(0)
        self._views: dict[tuple[int, int, int], Output] = {}  # (rows, outs, width of features) → output
        self._known = KnownBatches[Prepared]()

    def with_kv(self, config: ModelConfig, pack: Pack) -> CompiledForward:
        """Return a Forward of other weights, or of fewer layers, on this one's KV memory and threads."""
        return CompiledForward(
            config,
            pack,
            num_pages=self.kv.num_pages,
            threads=self.threads,
            max_context=self.positions,
            beside=self,
            share=self._share,
        )

    def leading(self, layers: int) -> CompiledForward:
        """Return the first layers with the last norm and the output layer, on the same weights and KV memory."""
        return self.with_kv(self.config.leading(layers), self.pack)

    def __call__(self, batch: Batch) -> Output:
        pass_, draws, output = self._known.get(batch) or self._prepare(batch)
        self.program.run_and_draw(pass_, draws)
        return output

    def run(self, batch: Batch) -> Output:
        """Run a pass that draws no tokens, and so starts no later one."""
        pass_, _, output = self._known.get(batch) or self._prepare(batch)
        self.program.run(pass_)
        return replace(output, drawn=None)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.program.rows_of(self.embedding, tokens)

    def project(self, states: Tensor) -> Tensor:
        if self._product is None:
            self._product = Product(self._library, self.output, pack=self.pack, threads=self.threads)
        return self._product(states)

    def pick(self, logits: Tensor, inverse_temperatures: Tensor, keys: Tensor) -> Tensor:
        return pick(self._library, self.threads, logits, inverse_temperatures, keys)

    def _prepare(self, batch: Batch) -> Prepared:
        width = self._features_width if batch.features else 0
        output = self._output(len(batch.tokens), len(batch.logit_rows), width)
        if batch.states:
            output = replace(output, states=torch.empty((len(batch.tokens), self._hidden)))
        drawn = (c_int32 * len(batch.logit_rows))()
        draws, pass_ = Draws(tokens=addressof(drawn)), Pass()
        if batch.seeds is not None and batch.inverse_temperatures is not None:
            draws.seeds, draws.inverse_temperature = batch.seeds.data_ptr(), batch.inverse_temperatures.data_ptr()
        draws.roots = None if batch.roots is None else batch.roots.data_ptr()
        point(pass_, batch, output)
        view = memoryview(drawn).cast("B").cast("i")  # faster to read than the array, and keeps it alive
        return self._known.put(batch, Prepared(pass_, draws, replace(output, drawn=view)))

    def _output(self, rows: int, outs: int, width: int) -> Output:
        """Return memory for results of this size, with `width` features a row. All sizes share logits and features."""
        if outs > len(self._logits) or rows * width > len(self._features):
            self._logits = torch.empty((max(outs, len(self._logits)), self.vocab_size))
            self._features = torch.empty(max(rows * width, len(self._features)))
            self._views.clear()
            self._known.clear()  # prepared structures point to the old memory
        if (rows, outs, width) not in self._views:
            argmax = torch.empty(outs, dtype=torch.int32)
            features = self._features[: rows * width].view(rows, -1) if width else None
            self._views[rows, outs, width] = Output(logits=self._logits[:outs], argmax=argmax, features=features)
        return self._views[rows, outs, width]


def _kv_memory(library: Library, shape: Shape, beside: CompiledForward | None) -> CpuKV:
    """Return new KV memory, or that of another Forward; `shape` then knows where it lies."""
    if beside is None:
        return CpuKV(library, shape)
    assert isinstance(beside.kv, CpuKV), "compiled programs share the memory of their own kernels"
    beside.kv.lend(shape)
    return beside.kv


def thread_question(config: ModelConfig, layout: Layout) -> object:
    """Return everything about a model that the best number of threads depends on."""
    return config, sorted(layout.formats), load_library().variant


class Programs:
    """Programs of one model over the same weights and KV memory, by number of threads."""

    def __init__(
        self,
        config: ModelConfig,
        pack: Pack,
        shape: Shape,
        kv: object,
        taps: Sequence[int],
        *,
        library: Library,
        share: Share | None = None,
    ) -> None:
        self.config, self.pack, self.shape, self.kv, self.taps = config, pack, shape, kv, taps
        self.library, self.share = library, share
        self.built: dict[int, Program] = {}
        self.ropes: Ropes = {}

    def build(self, threads: int) -> Program:
        if threads not in self.built:
            program = Program(self.library, self.shape, pack=self.pack, kv=self.kv, threads=threads)
            positions = self.shape.positions
            assembly = Assembly(
                self.config, self.pack, program, positions=positions, ropes=self.ropes, share=self.share
            )
            assembly.assemble(self.taps)
            program.finish()
            self.built[threads] = program
        return self.built[threads]

    def trial(self, threads: int, rows: int = TRIAL_ROWS) -> RunPass:
        """Return a function that runs a pass over a few rows. It writes to KV memory that no sequence uses yet."""
        program, rows = self.build(threads), min(rows, self.shape.positions)
        counts, zeros = torch.arange(rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
        ends = torch.tensor([0, rows], dtype=torch.int32)
        table = torch.zeros((1, 1), dtype=torch.int32)
        batch = Batch(zeros, counts, counts, ends, ends[1:], table, logit_rows=counts)
        output = Output(torch.empty((rows, self.config.vocab_size)), torch.empty(rows, dtype=torch.int32))
        pass_ = Pass()
        point(pass_, batch, output)

        def run(kept: object = (batch, output)) -> None:
            program.run(pass_)

        return run


def point(to: Pass, batch: Batch, output: Output) -> None:
    """Let a pass read the batch and write to `output`."""
    to.tokens = batch.tokens.data_ptr()
    to.positions = batch.positions.data_ptr()
    to.slots = batch.slots.data_ptr()
    to.row_starts = batch.row_starts.data_ptr()
    to.bases = batch.bases.data_ptr()
    to.page_table = batch.page_table.data_ptr()
    to.logit_rows = batch.logit_rows.data_ptr()
    to.logits, to.argmax = output.logits.data_ptr(), output.argmax.data_ptr()
    to.features = None if output.features is None else output.features.data_ptr()
    to.states = None if output.states is None else output.states.data_ptr()
    to.rows, to.outs, to.sequences = len(batch.tokens), len(batch.logit_rows), len(batch.bases)
    to.table_width = batch.page_table.shape[1]
    to.tails, to.depth = (None, 0) if batch.tails is None else (batch.tails.data_ptr(), batch.tails.shape[1])


def kv_bytes_per_page(config: ModelConfig) -> int:
    return page_bytes(layers=config.num_layers, kv_heads=config.num_kv_heads, head_dim=config.head_dim)


def check_supported(config: ModelConfig) -> None:
    """Raise UnsupportedModel for sizes that the kernels do not have."""
    widths = {
        "hidden size": config.hidden_size,
        "intermediate size": config.intermediate_size,
        "width of attention": config.num_heads * config.head_dim,
    }
    for what, width in widths.items():
        if width % GROUP:
            raise UnsupportedModel(f"{what} {width}; the CPU kernels need a multiple of {GROUP}: use format fp32")
    if config.head_dim % TILE or config.head_dim > HEAD_DIM_MAX:
        raise UnsupportedModel(
            f"head dimension {config.head_dim}; the CPU kernels need a multiple of {TILE} up to {HEAD_DIM_MAX}: "
            "use format fp32"
        )
    if config.num_heads // config.num_kv_heads > QUERY_BLOCK:
        raise UnsupportedModel(
            f"{config.num_heads} heads on {config.num_kv_heads} key/value heads; the CPU kernels let at most "
            f"{QUERY_BLOCK} share one: use format fp32"
        )


def shape_of(config: ModelConfig, *, pages: int, positions: int) -> Shape:
    return Shape(
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab=config.vocab_size,
        layers=config.num_layers,
        pages=pages,
        positions=positions,
    )


class Assembly:
    """Turns packed weights into the operations of a decoder."""

    def __init__(
        self,
        config: ModelConfig,
        pack: Pack,
        program: Program,
        *,
        positions: int,
        ropes: Ropes,
        causal: Sequence[bool] = (),
        share: Share | None = None,
    ) -> None:
        """`causal`: see `Program.attend`, by layer; (): all are. `share`: the part of one rank."""
        self.config = config
        self.share = share
        self.causal = causal
        self.pack = pack
        self.program = program
        self.positions = positions
        self.ropes = ropes

    def assemble(self, taps: Sequence[int]) -> None:
        """Add the operations of the whole decoder."""
        config = self.config
        embed = self.pack.matrix("embed")
        self._embed(embed)
        for layer in range(config.num_layers):
            if layer in taps:
                self.program.keep(taps.index(layer) * config.hidden_size)
            self.layer(layer)
        head = embed if config.tied_head else self.pack.matrix("head")
        norm = self.pack.vector("norm")
        if config.num_layers in taps:
            self.program.keep(taps.index(config.num_layers) * config.hidden_size, norm=norm, epsilon=config.norm_eps)
        if config.num_layers + 1 in taps:
            self.program.keep(taps.index(config.num_layers + 1) * config.hidden_size)
        self.program.keep_states(norm, epsilon=config.norm_eps)
        if UP in self.pack:
            self._shortlist(norm)
        self.program.linear(
            [head], source=Buffer.RESIDUAL, epilogue=Epilogue.LOGITS, norm=norm, epsilon=config.norm_eps
        )

    def _embed(self, embed: Packed) -> None:
        share, scale = self.share, self.config.embedding_scale
        self.program.embed(embed, scale=scale, first=share.first_token if share else 0)
        if share and share.segment:  # one rank has the embedding of a token, the others zeros
            self.program.sum(Buffer.RESIDUAL, Buffer.RESIDUAL, parts=1, epilogue=Epilogue.STORE)

    def _shortlist(self, norm: Tensor) -> None:
        """Let drafts compute only the outputs that may be among the best."""
        down, up, exact = (self.pack.matrix(name) for name in (DOWN, UP, EXACT))
        norms = torch.ones_like(norm), norm
        self.program.shortlist(down, up, exact, few=FITTED_EXACT_OUTPUTS, norms=norms, epsilon=self.config.norm_eps)

    def layer(self, index: int, *, source: Buffer = Buffer.RESIDUAL, normed: bool = True) -> None:
        """Add the operations of a layer. Attention reads `source`, with the layer's norm unless `normed` is False."""
        self._attention(index, f"layers.{index}.", source, normed=normed)
        self._mlp(f"layers.{index}.")

    def project(self, layer: int, *, source: Buffer, norm: Tensor | None) -> None:
        """Add the operations that make queries, keys and values, and store the last two."""
        config, program, prefix = self.config, self.program, f"layers.{layer}."
        parts = [self.pack.matrix(prefix + name) for name in "qkv"]
        program.linear(parts, source=source, target=Buffer.PROJECTED, norm=norm, epsilon=config.norm_eps)
        norms = (self.pack.vector(prefix + "q_norm"), self.pack.vector(prefix + "k_norm")) if config.qk_norm else None
        scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        program.rotate(layer, *self._rope(layer), scale=scale, norms=norms, epsilon=config.norm_eps)

    def attend(self, layer: int) -> None:
        """Add the operation of attention, between `project` and the product that ends its branch."""
        window = self.config.windows[layer] if self.config.windows else 0
        self.program.attend(layer, window=window, causal=self.causal[layer] if self.causal else True)

    def _attention(self, layer: int, prefix: str, source: Buffer, *, normed: bool) -> None:
        self.project(layer, source=source, norm=self.pack.vector(prefix + "attn_norm") if normed else None)
        self.attend(layer)
        self._branch(prefix + "o", prefix + "post_attn_norm", source=Buffer.ATTENDED)

    def _mlp(self, prefix: str) -> None:
        self.gate(prefix, source=Buffer.RESIDUAL, norm=self.pack.vector(prefix + "mlp_norm"))
        self._branch(prefix + "down", prefix + "post_mlp_norm", source=Buffer.GATED)

    def gate(self, prefix: str, *, source: Buffer, norm: Tensor | None) -> None:
        """Add the products of the MLP before the one that ends its branch."""
        gate = Epilogue.SILU_GATE if self.config.activation == "silu" else Epilogue.GELU_GATE
        parts = [self.pack.matrix(prefix + "gate"), self.pack.matrix(prefix + "up")]
        self.program.linear(
            parts,
            source=source,
            target=Buffer.GATED,
            epilogue=gate,
            norm=norm,
            epsilon=self.config.norm_eps,
        )

    def _branch(self, name: str, norm: str, *, source: Buffer) -> None:
        """Add the product that ends a branch, and its sum with the residual stream."""
        target, epilogue = Buffer.RESIDUAL, Epilogue.ADD
        if self.config.post_norms:
            target, epilogue = Buffer.BRANCH, Epilogue.STORE
        if self.share is None:
            self.program.linear([self.pack.matrix(name)], source=source, target=target, epilogue=epilogue)
        else:
            counts = self.share.inputs[name.rpartition(".")[2]]
            self._sum_over_shards(self.pack.matrix(name), counts, source, target, epilogue)
        if self.config.post_norms:
            self.program.add_norm(self.pack.vector(norm), epsilon=self.config.norm_eps)

    def _sum_over_shards(
        self, matrix: Packed, counts: Sequence[int], source: Buffer, target: Buffer, epilogue: Epilogue
    ) -> None:
        """Add the product of each shard, and the sum of all shards of all ranks. `counts`: inputs of each shard."""
        first = 0
        for place, count in enumerate(counts):
            self.program.part(matrix.columns(first, count), source=source, first=first, place=place)
            first += count
        self.program.sum(Buffer.BRANCH, target, parts=len(counts), epilogue=epilogue)

    def _rope(self, layer: int) -> tuple[Tensor, Tensor]:
        key = layer_rope(self.config, layer)
        if key not in self.ropes:
            self.ropes[key] = rope_tables(self.config, *key, self.positions)
        return self.ropes[key]
