"""The decoder as a sequence of kernel launches on a CUDA device, and the Forward made of it.

For up to 64 rows a layer is seven launches: q·k·v, attention with rotation and KV store, o, residual + norm, gate·up,
down, residual + norm. The rotation is an eighth launch if queries and keys are normed, or if a sequence has more rows
than one block of attention. Beyond 64 rows each product takes the fastest way with the same bits; with cuBLAS the gate
or a bias is a launch of its own.

All buffers keep their addresses, so that a pass over given shapes can be captured as a graph. Every kernel computes a
row by itself in a fixed order, so that a row's bits never depend on the other rows of a batch.

`CudaDecoder` has weights and no KV memory; `CudaForward` joins it with one. A quantised copy of a target that drafts
for it uses the target's own KV memory: verification overwrites every slot that the copy has written.
"""

from __future__ import annotations

import itertools
from collections.abc import MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from paceline.errors import UnsupportedModel
from paceline.kernels.base import PAGE_SIZE, Batch, Output
from paceline.kernels.cuda.attend import Attention, Rotation, block_for
from paceline.kernels.cuda.compiling import compiling, rehearsal, rehearsing
from paceline.kernels.cuda.expand import has_room
from paceline.kernels.cuda.formats import CudaMatrix, requantise
from paceline.kernels.cuda.kv import CudaKV
from paceline.kernels.cuda.linear import GELU, SILU, Products
from paceline.kernels.cuda.norm import add_norm, embed, finish_norm, norm
from paceline.kernels.cuda.rotate import rotate
from paceline.kernels.cuda.states import keep
from paceline.kernels.cuda.tiles import parts_of
from paceline.kernels.noise import pick
from paceline.kernels.quant import Weight
from paceline.models.config import ModelConfig
from paceline.models.rope import layer_rope, rope_tables
from paceline.runner.forwards.cuda_layers import CudaLayer, Packer
from paceline.runner.forwards.cuda_share import CudaShare
from paceline.runner.forwards.device_batch import DeviceBatch, Ends, padded_rows, padded_sizes


class CudaDecoder:
    """A decoder with its weights packed for the CUDA kernels.

    `weights` is emptied while it is packed, so that only one matrix at a time is on the device twice.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: MutableMapping[str, Weight],
        *,
        max_context: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cuda",
        pdl: bool | None = None,
        expand: bool | None = None,
        share: CudaShare | None = None,
    ) -> None:
        """`pdl` turns on programmatic dependent launch: a kernel starts before the one before it has ended. None: on if
        the device supports it, from Hopper on. `expand` stores matrices of a grouped format as floats, and adds them
        to 8-bit floats: they take more memory, are faster to multiply with, and give the same bits. None: if the device
        has room for it. `share`: the weights are one rank's part, and `config` has the heads and MLP columns of this
        part, with the whole vocabulary."""
        if config.head_dim > 256 or config.head_dim % 16:
            raise UnsupportedModel(
                f"head dimension {config.head_dim}; the CUDA kernels need a multiple of 16 up to 256"
            )
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        self.pdl = torch.cuda.get_device_capability(device) >= (9, 0) if pdl is None else pdl
        room = has_room(weights, self.device) if expand is None else expand
        self.share = self.head_share = share
        parts = None if share is None else share.parts
        self._assemble(Packer(weights, dtype=dtype, device=self.device, expand=room, parts=parts), max_context)
        self.products = Products(self.matrices(), device=device, pdl=self.pdl)
        self.attention = Attention(device=device)
        self.scale = config.attention_scale or config.head_dim**-0.5
        self.activation = SILU if config.activation == "silu" else GELU
        self._buffers: dict[str, list[Tensor]] = {}  # by name, the largest last

    def quantised(self, format: str) -> CudaDecoder:
        """Return a quantised copy that shares embedding, norms and rotary tables, with scratch memory of its own."""

        def fewer(matrix: CudaMatrix, *, gated: bool = False) -> CudaMatrix:
            parts = parts_of(matrix.outputs, matrix.inputs, gated=gated, floats=False)
            return requantise(matrix, format, parts=parts)

        other = copy(self)
        other.layers = [
            replace(
                layer,
                qkv=fewer(layer.qkv),
                o=fewer(layer.o),
                gate_up=fewer(layer.gate_up, gated=True),
                down=fewer(layer.down),
            )
            for layer in self.layers
        ]
        other.head = fewer(self.head)
        other._work_apart()
        return other

    def leading(self, layers: int) -> CudaDecoder:
        """Return the decoder of the first layers, which shares all weights, with scratch memory of its own."""
        part = copy(self)
        part.config, part.layers = self.config.leading(layers), self.layers[:layers]
        part._work_apart()
        return part

    def _work_apart(self) -> None:
        """Let a copy have kernels' settings and scratch memory of its own."""
        self.products = Products(self.matrices(), device=self.device, pdl=self.pdl)
        self.attention = Attention(device=self.device)
        self._buffers = {}

    @torch.inference_mode()
    def profile(self, rows: int, outs: int) -> None:
        """Run the largest passes, over prompts and with the most logits, to allocate every buffer. Smaller prompts
        follow, of every size, so that the ways of their products are known."""
        with self.alone():
            with compiling():
                self._run_largest(rows, outs)
            with rehearsal():
                self._run_largest(rows, outs)
        torch.cuda.synchronize(self.device)

    def _run_largest(self, rows: int, outs: int) -> None:
        zeros = torch.zeros(max(padded_rows(rows), outs), dtype=torch.int32, device=self.device)
        kv = new_kv(self.config, num_pages=0, dtype=self.dtype, device=self.device)
        ends = torch.tensor([0, 1], dtype=torch.int32, device=self.device)
        for count in dict.fromkeys((*padded_sizes(rows), outs)):
            few = zeros[:count]
            whole = DeviceBatch(few, few, few, ends, zeros[:1, None], seats=1, max_rows=1, max_context=1)
            self.logits(replace(whole, logit_rows=few[:outs].long()), kv)

    def alone(self) -> AbstractContextManager[None]:
        """Let passes within the block wait for no other rank, see `CudaShare`."""
        return nullcontext() if self.share is None else self.share.alone()

    def matrices(self) -> list[CudaMatrix]:
        inner = [m for layer in self.layers for m in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        return [*inner, self.head]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices that one pass reads."""
        return sum(matrix.bytes for matrix in self.matrices())

    def fill(self, rows: DeviceBatch, kv: CudaKV) -> None:
        """Compute keys and values of the rows, and nothing that they do not need."""
        none = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.hidden(rows, kv, ends=Ends(none[:0].long(), none, none[:0], seats=0, max_rows=0))

    def logits(
        self,
        rows: DeviceBatch,
        kv: CudaKV,
        *,
        every: int = 1,
        taps: Sequence[int] = (),
        kept: Tensor | None = None,
    ) -> Tensor:
        """Compute logits float32 [outs, vocab], in memory that the next pass reuses.

        Without `logit_rows` the outs are the last of each `every` rows. States at the `taps`, side by side, are written
        to `kept` [rows, taps · hidden]."""
        hidden = self.hidden(rows, kv, taps=taps, kept=kept)
        return self.project(hidden[every - 1 :: every] if rows.logit_rows is None else hidden[rows.logit_rows])

    def project(self, hidden: Tensor) -> Tensor:
        """Compute logits float32 [rows, vocab] of hidden states, in memory that the next call with as many reuses."""
        out = self._buffer("logits", len(hidden), self.head.outputs, torch.float32)
        self.products(hidden, self.head, out)
        share = self.head_share
        if share is None or share.peers.ranks == 1:
            return out
        whole = self._buffer("logits of all ranks", len(hidden), share.columns, torch.float32)
        share.peers.gather(out, whole, pdl=self.pdl)
        return whole

    def hidden(
        self,
        rows: DeviceBatch,
        kv: CudaKV,
        *,
        taps: Sequence[int] = (),
        kept: Tensor | None = None,
        ends: Ends | None = None,
    ) -> Tensor:
        """Compute the hidden states [rows, hidden] after the final norm; with `ends` [ends, hidden], of these alone."""
        config, last = self.config, len(self.layers) - 1
        assert ends is None or max(taps, default=0) <= last, "a tap after the last layer wants all rows"
        x = self._buffer("x", len(rows.tokens), config.hidden_size)
        y = self._buffer("y", len(rows.tokens), config.hidden_size)
        embed(rows.tokens, self.embedding, x, scale=config.embedding_scale, pdl=self.pdl)
        norm(x, self.layers[0].attn_norm, y, eps=config.norm_eps, pdl=self.pdl)
        for index in self._passed(taps):
            layer = self.layers[index]
            self._keep(x, index, taps, kept)
            after = self.layers[index + 1].attn_norm if index < last else self.norm
            attended = self._attend(index, layer, y, rows, kv, ends=ends if index == last else None)
            if ends is not None and index == last:
                x, y = x[ends.index], y[: len(attended)]
            if not len(x):
                break
            self._branch(attended, layer.o, x, y, layer.post_attn_norm, layer.mlp_norm)
            gated = self._buffer("gated", len(x), config.intermediate_size)
            self.products(y, layer.gate_up, gated, activation=self.activation)
            self._branch(gated, layer.down, x, y, layer.post_mlp_norm, after)
        self._keep(y, len(self.layers), taps, kept)
        self._keep(x, len(self.layers) + 1, taps, kept)
        return y

    def _passed(self, taps: Sequence[int]) -> Sequence[int]:
        """List the layers of a pass: all, or in a rehearsal one of each kind, as others need the same."""
        count = len(self.layers)
        if not rehearsing():
            return range(count)
        kinds = {layer.kind: index for index, layer in reversed([*enumerate(self.layers)])}
        return sorted({*kinds.values(), *(tap for tap in taps if tap < count), count - 1})

    def memory_for(self, taps: Sequence[int], rows: int) -> Tensor:
        """Allocate memory for the states of a pass at these taps, [rows, taps · hidden]."""
        return torch.empty((rows, len(taps) * self.config.hidden_size), dtype=self.dtype, device=self.device)

    def _keep(self, x: Tensor, index: int, taps: Sequence[int], kept: Tensor | None) -> None:
        """Copy the states at tap `index` to their places in `kept`."""
        for place, tap in enumerate(taps):
            if kept is not None and tap == index:
                keep(x, kept, place, pdl=self.pdl)

    def embed(self, tokens: Tensor) -> Tensor:
        """Look up embeddings [n, hidden], unscaled."""
        x = torch.empty((len(tokens), self.config.hidden_size), dtype=self.dtype, device=self.device)
        embed(tokens.to(self.device), self.embedding, x)
        return x

    def _attend(
        self, index: int, layer: CudaLayer, y: Tensor, rows: DeviceBatch, kv: CudaKV, *, ends: Ends | None = None
    ) -> Tensor:
        """Store keys and values of all rows, and compute attention of all rows, or of `ends` alone."""
        config = self.config
        heads, group = config.num_heads, config.num_heads // config.num_kv_heads
        qkv = self._buffer("qkv", len(y), layer.qkv.outputs)
        sums = None
        if ends is None and layer.qkv.bias is None and self._turns(layer, rows):
            sums = self.products.sums(y, layer.qkv, qkv, residual=False)
        if sums is None:
            self.products(y, layer.qkv, qkv)
        if ends is not None:
            self._rotate(index, layer, qkv, rows, kv)
            rows, qkv = ends.of(rows), qkv[ends.index]
        out = self._buffer("attended", len(qkv), heads * config.head_dim)
        if not rows.seats:
            return out
        packed, turns = qkv[None] if sums is None else sums, self._turns(layer, rows)
        self.attention(
            packed if turns else self._rotate(index, layer, qkv, rows, kv),
            kv,
            index,
            row_starts=rows.row_starts,
            positions=rows.positions if rows.lasts is None else rows.lasts,
            page_table=rows.page_table,
            lanes=rows.lanes,
            bases=rows.bases,
            tails=rows.tails,
            leads=rows.leads,
            out=out.view(-1, heads, config.head_dim),
            seats=rows.seats,
            max_rows=rows.max_rows,
            max_context=rows.max_context,
            window=layer.window,
            scale=self.scale,
            block_m=block_for(group, rows.max_rows),
            rotation=Rotation(rows.slots, layer.cos, layer.sin, parts=len(packed)) if turns else None,
            pdl=self.pdl,
        )
        return out

    def _turns(self, layer: CudaLayer, rows: DeviceBatch) -> bool:
        """Return True if attention itself rotates: queries are not normed, rows end at their own positions, and a block
        has all rows of a sequence."""
        group = self.config.num_heads // self.config.num_kv_heads
        return layer.q_norm is None and rows.lasts is None and rows.max_rows <= block_for(group, rows.max_rows) // group

    def _rotate(self, index: int, layer: CudaLayer, qkv: Tensor, rows: DeviceBatch, kv: CudaKV) -> Tensor:
        """Store keys and values of the rows; return their queries [rows, heads, head_dim]."""
        heads, head_dim = self.config.num_heads, self.config.head_dim
        queries = self._buffer("queries", len(qkv), heads * head_dim).view(-1, heads, head_dim)
        rotate(
            qkv,
            queries,
            kv,
            index,
            positions=rows.positions,
            slots=rows.slots,
            cos=layer.cos,
            sin=layer.sin,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=self.config.norm_eps,
            pdl=self.pdl,
        )
        return queries

    def _branch(
        self,
        source: Tensor,
        matrix: CudaMatrix,
        x: Tensor,
        y: Tensor,
        post: Tensor | None,
        following: Tensor,
    ) -> None:
        """Add a branch to the residual stream: x += source · matrix (with its `post` norm), then y = norm of x with the
        weight `following`."""
        eps = self.config.norm_eps
        if self.share is not None:
            for some in (slice(i, i + self.share.peers.programs) for i in range(0, len(x), self.share.peers.programs)):
                self._branch_over_ranks(self.share, source[some], matrix, x[some], y[some], post, following)
            return
        if post is None:
            sums = self.products.sums(source, matrix, x)
            if sums is not None:
                finish_norm(sums, matrix.bias, x, following, y, eps=eps, pdl=self.pdl)
                return
            self.products(source, matrix, x, residual=x)
            norm(x, following, y, eps=eps, pdl=self.pdl)
        else:
            branch = self._buffer("branch", len(x), x.shape[1])
            self.products(source, matrix, branch)
            add_norm(x, branch, post, following, y, eps=eps, pdl=self.pdl)

    def _branch_over_ranks(
        self,
        share: CudaShare,
        source: Tensor,
        matrix: CudaMatrix,
        x: Tensor,
        y: Tensor,
        post: Tensor | None,
        following: Tensor,
    ) -> None:
        """Add a branch of which every rank has a part, see `_branch`."""
        eps, parts = self.config.norm_eps, self.products.parts(source, matrix)
        if post is None:
            share.peers.add_norm(parts, matrix.bias, x, following, y, eps=eps, pdl=self.pdl)
        else:
            branch = self._buffer("branch", len(x), x.shape[1])
            share.peers.add(parts, matrix.bias, branch, pdl=self.pdl)
            add_norm(x, branch, post, following, y, eps=eps, pdl=self.pdl)

    def _buffer(self, name: str, rows: int, columns: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor [rows, columns] at an address that changes only if more rows are wanted than ever before.

        It starts as zeros, because products also read rows that only pad a pass, which attention skips."""
        sizes = self._buffers.setdefault(name, [])
        if not sizes or len(sizes[-1]) < rows:  # recorded rounds still use the smaller ones
            size = 1 << max(rows - 1, 0).bit_length()
            sizes.append(torch.zeros((size, columns), dtype=dtype or self.dtype, device=self.device))
        return sizes[-1][:rows]

    def _assemble(self, packer: Packer, max_context: int) -> None:
        self.embedding = packer.matrix("embed")
        self.layers = self._packed_layers(packer, max_context)
        self.norm = packer.vector("norm")
        self.head = packer.matrix("head") if "head" in packer else self.embedding

    def _packed_layers(self, packer: Packer, max_context: int) -> list[CudaLayer]:
        config, ropes = self.config, dict[object, tuple[Tensor, Tensor]]()
        for key in dict.fromkeys(layer_rope(config, index) for index in range(config.num_layers)):
            cos, sin = rope_tables(config, *key, max_context + 1)
            ropes[key] = cos.to(self.device), sin.to(self.device)
        return [packer.layer(config, index, *ropes[layer_rope(config, index)]) for index in range(config.num_layers)]


class CudaForward:
    """Implements Forward for batches from the host and outputs to the host; rounds call the decoder directly."""

    pick = staticmethod(pick)

    def __init__(self, decoder: CudaDecoder, kv: CudaKV, *, taps: Sequence[int] = ()) -> None:
        self._whole = decoder.share is None or decoder.share.peers.ranks == 1  # else only rounds may run it
        on_gpu = decoder.device.type == "cuda"
        self.bitwise = on_gpu and torch.cuda.get_device_capability(decoder.device) == (9, 0)  # verified on Hopper only
        self.decoder = decoder
        self.kv = kv
        self.vocab_size = decoder.config.vocab_size
        self.taps = taps

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Output:
        assert self._whole, "ranks meet in rounds, which all of them run"
        rows, last, hidden = len(batch.tokens), len(self.decoder.layers), self.decoder.config.hidden_size
        taps = tuple(self.taps) if batch.features else ()
        wanted = (*taps, last) if batch.states else taps
        kept = self.decoder.memory_for(wanted, padded_rows(rows))
        logits = self.decoder.logits(self._placed(batch), self.kv, taps=wanted, kept=kept)
        argmax = logits.argmax(dim=-1).to(torch.int32)
        features = kept[:rows, : len(taps) * hidden].float() if taps else None
        states = kept[:rows, len(taps) * hidden :].float() if batch.states else None
        return Output(logits=logits.cpu(), argmax=argmax.cpu(), features=features, states=states)

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        return self.decoder.embed(tokens)

    @torch.inference_mode()
    def project(self, states: Tensor) -> Tensor:
        assert self._whole, "ranks meet in rounds, which all of them run"
        return self.decoder.project(states.to(self.decoder.dtype).contiguous())

    def _placed(self, batch: Batch) -> DeviceBatch:
        device = self.decoder.device
        starts = batch.row_starts.tolist()
        padding = (0, padded_rows(len(batch.tokens)) - len(batch.tokens))
        return DeviceBatch(
            tokens=functional.pad(batch.tokens, padding).to(device),
            positions=functional.pad(batch.positions, padding).to(device),
            slots=functional.pad(batch.slots, padding, value=self.kv.scratch_page * PAGE_SIZE).to(device),
            row_starts=batch.row_starts.to(device),
            page_table=batch.page_table.clamp(min=0).to(device),
            seats=len(starts) - 1,
            max_rows=max(stop - start for start, stop in itertools.pairwise(starts)),
            max_context=min(int(batch.positions.max()) + 1, batch.page_table.shape[1] * PAGE_SIZE),
            bases=batch.bases.to(device) if batch.tails is not None else None,
            tails=batch.tails.to(device) if batch.tails is not None else None,
            leads=torch.arange(len(batch.tokens), dtype=torch.int32, device=device),  # each row reads its own tail
            logit_rows=batch.logit_rows.long().to(device),
        )


def new_kv(config: ModelConfig, *, num_pages: int, dtype: torch.dtype, device: torch.device | str) -> CudaKV:
    return CudaKV(
        layers=config.num_layers,
        num_pages=num_pages,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device=device,
    )
