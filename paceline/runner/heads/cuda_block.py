"""A block drafter as a sequence of kernel launches on a CUDA device; `models.block_config` has its formulas.

    context   features ─fc─▶ norm ─▶ keys and values of every layer, at their slots
    blocks    pages of the context, then pages of the seat's own

               positions     0 ............ p-1 │ p ...... p+B-1
               pages         the sequence's own │ the seat's

A block begins inside the last page of its context where that has room. From p on nothing of that page has been read, so
no other sequence has it, nor the prefix cache; what the block leaves there is overwritten when the states of these
positions are read. The tokens of a block are drawn one after the other, because a markov head asks for the token
before; layers and output layer run once for all of them. A drafter's own confidence is not computed here: rounds
estimate one from the logits.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from paceline.errors import UnsupportedModel
from paceline.kernels.base import PAGE_SIZE
from paceline.kernels.cuda import prefill
from paceline.kernels.cuda.compiling import compiling
from paceline.kernels.cuda.formats import CudaMatrix
from paceline.kernels.cuda.kv import CudaKV
from paceline.kernels.cuda.norm import embed, norm
from paceline.kernels.round_reference import DeviceLanes
from paceline.models.block_config import BlockConfig
from paceline.models.block_heads import BlockHead
from paceline.runner.forwards.cuda import CudaDecoder, new_kv
from paceline.runner.forwards.cuda_layers import CudaLayer, Packer
from paceline.runner.forwards.device_batch import DeviceBatch, Ends, padded_sizes
from paceline.runner.heads.cuda_dflash2 import CudaSelector, convolutions
from paceline.runner.heads.markov import next_factor

MAX_OUTS = 512  # rows whose logits are in memory at once: 300 MB for a vocabulary of 152,000
ALIGNED = 4  # logits in 16 bytes, by which Triton tells aligned addresses
FACTORS = ("before", "after", "gate", "joint")  # matrices of a markov head


class CudaBlock(CudaDecoder):
    """Implements ReadingHead for rounds on a CUDA device: a block drafter with its weights packed for the kernels.

    `head.weights` is emptied while it is packed."""

    def __init__(self, head: BlockHead, target: CudaDecoder, *, max_context: int) -> None:
        self.block = head.config
        self._target = target
        self.ids = head.ids.to(device=target.device, dtype=torch.int32)
        super().__init__(
            replace(head.config.decoder, embedding_scale=head.config.embedding_scale),
            head.weights,
            max_context=max_context + head.config.block_size,
            dtype=target.dtype,
            device=target.device,
            pdl=target.pdl,
        )
        # Of the latest blocks: states [tokens · seats, hidden], logits of some of them, and the memory of an rnn.
        self._states = self._logits = self._memory = torch.empty(0)

    @property
    def pages_of_a_seat(self) -> int:
        """Pages beside those of the sequences, for the rows of one block."""
        return -(-self.block.block_size // PAGE_SIZE)

    def new_kv(self, num_pages: int, *, seats: int) -> None:
        """Allocate memory for keys and values, and for the blocks of as many seats."""
        self._first_own = num_pages + 1  # behind the target's scratch page, to which reading writes padding
        pages = self._first_own + seats * self.pages_of_a_seat
        self.kv = new_kv(self.config, num_pages=pages, dtype=self.dtype, device=self.device)

    # ── context ──

    def read(self, rows: DeviceBatch, features: Tensor) -> None:
        """Compute keys and values of rows with these hidden states [rows, taps · target's hidden]."""
        states, y = (self._buffer(name, len(features), self.config.hidden_size) for name in ("states", "y"))
        self.products(features, self.fc, states)
        norm(states, self._context_norm, y, eps=self.config.norm_eps, pdl=self.pdl)
        for index, layer in enumerate(self.layers):
            qkv = self._buffer("qkv", len(y), layer.qkv.outputs)
            self.products(y, layer.qkv, qkv)
            self._rotate(index, layer, qkv, rows, self.kv)

    # ── blocks ──

    def run(self, state: DeviceLanes, seats: Tensor, *, context: int, tokens: int) -> Tensor:
        """Run a pass over one block for each of the `seats`, int32 lanes, whose context has been read; return their
        last committed tokens, int32 [seats].

        `context`: bound of their lengths. `tokens`: drafted tokens that are wanted of each block."""
        rows = self._lay_out(state, seats, context=context, count=self.block.rows_for(tokens))
        self._run_rows(rows, tokens)
        return rows.tokens[rows.row_starts[:-1].long()]

    def logits_after(self, turn: int, before: Tensor) -> Tensor:
        """Return logits [seats, draft vocabulary] of the token that each seat drafts after `turn` others; `before`,
        int32 [seats], is the last of them, or the last committed one. Turns are asked for once each, in order."""
        seats = len(before)
        each = max(1, MAX_OUTS // seats)  # turns whose logits are computed at once
        if turn % each == 0:
            self._logits = self._project_rows(self._states[turn * seats :][: each * seats])
        logits = self._logits[turn % each * seats :][:seats]
        if self.head.outputs % ALIGNED:
            logits = logits.clone()  # rounds have compiled their kernels for rows that begin at aligned addresses
        states = self._states[turn * seats :][:seats]
        if self._selector is not None:
            return self._selector.chosen(logits, states, before, self._buffered)
        if self.block.markov is None:
            return logits
        embedded = self._buffer("embedded", seats, self.block.markov.rank)
        embed(before, self._markov["before"], embedded, pdl=self.pdl)
        factor, self._memory = next_factor(self.block.markov.kind, self._memory, embedded, states, self._product)
        return logits.add_(self._product("after", factor))

    def _run_rows(self, rows: DeviceBatch, tokens: int) -> None:
        first, count, device = 1 - self.block.anchor_first, rows.max_rows, self.device
        at = torch.arange(tokens, device=device)[:, None] + torch.arange(rows.seats, device=device) * count
        hidden = self.hidden(rows, self.kv) if self.block.convolutions is None else self._convolved(rows)
        self._states = hidden[(at + first).flatten()]
        if self.block.markov is not None:
            self._memory = self._states.new_zeros((rows.seats, self.block.markov.rank))

    def _convolved(self, rows: DeviceBatch) -> Tensor:
        """Compute the states [rows, hidden] of blocks after the last norm, with convolutions around attention and MLP
        of each layer."""
        config, eps = self.config, self.config.norm_eps
        x, y = (self._buffer(name, len(rows.tokens), config.hidden_size) for name in "xy")
        embed(rows.tokens, self.embedding, x, scale=config.embedding_scale, pdl=self.pdl)
        for index in self._passed(()):
            layer, (attention, mlp) = self.layers[index], self._convolutions[index]
            norm(x, layer.attn_norm, y, eps=eps, pdl=self.pdl)
            inputs, after = attention.around(y, rows.max_rows, self._buffered)
            x += after(self._buffered(self._attend(index, layer, inputs, rows, self.kv), layer.o))
            norm(x, layer.mlp_norm, y, eps=eps, pdl=self.pdl)
            inputs, after = mlp.around(y, rows.max_rows, self._buffered)
            gated = self._buffer("gated", len(x), config.intermediate_size)
            self.products(inputs, layer.gate_up, gated, activation=self.activation)
            x += after(self._buffered(gated, layer.down))
        norm(x, self.norm, y, eps=eps, pdl=self.pdl)
        return y

    def _buffered(self, x: Tensor, matrix: CudaMatrix) -> Tensor:
        """Multiply rows with a matrix, in memory that the next such product of as many outputs reuses."""
        out = self._buffer(f"{matrix.outputs} outputs", len(x), matrix.outputs)
        self.products(x, matrix, out)
        return out

    def _project_rows(self, states: Tensor) -> Tensor:
        """Compute logits [rows, draft vocabulary] of states, before a markov head corrects them."""
        logits = self.project(states)
        if self.block.logit_scale != 1.0:
            logits *= self.block.logit_scale
        if self.block.softcap:
            logits.div_(self.block.softcap).tanh_().mul_(self.block.softcap)
        return logits

    def _product(self, name: str, x: Tensor) -> Tensor:
        matrix = self._markov[name]
        out = self._buffer(name, len(x), matrix.outputs, torch.float32 if name == "after" else None)
        self.products(x, matrix, out)
        return out

    def _lay_out(self, state: DeviceLanes, seats: Tensor, *, context: int, count: int) -> DeviceBatch:
        """Make the rows of blocks, `count` each: the last committed token of a seat, then masks."""
        lanes, device, own = seats.long(), self.device, self.pages_of_a_seat
        at = state.lengths[lanes] - 1  # [seats] positions of the last committed tokens
        positions = at[:, None] + torch.arange(count, device=device, dtype=torch.int32)
        first = -(-at // PAGE_SIZE)[:, None]  # the page behind the context
        page = torch.arange(state.pages.shape[1] + own, device=device, dtype=torch.int32)
        mine = self._first_own + own * torch.arange(len(seats), device=device, dtype=torch.int32)[:, None]
        theirs = functional.pad(state.pages[lanes], (0, own))
        table = torch.where(page < first, theirs, mine + (page - first).clamp(0, own - 1))
        slots = table.gather(1, (positions // PAGE_SIZE).long()) * PAGE_SIZE + positions % PAGE_SIZE
        tokens = torch.full((len(seats), count), self.block.mask_token, dtype=torch.int32, device=device)
        tokens[:, 0] = state.tokens[lanes, at.long()]
        return DeviceBatch(
            tokens=tokens.flatten(),
            positions=positions.flatten(),
            slots=slots.flatten(),
            row_starts=count * torch.arange(len(seats) + 1, dtype=torch.int32, device=device),
            page_table=table,
            seats=len(seats),
            max_rows=count,
            max_context=context + count,
            lasts=positions[:, -1:].repeat(1, count).flatten(),
        )

    def _attend(
        self, index: int, layer: CudaLayer, y: Tensor, rows: DeviceBatch, kv: CudaKV, *, ends: Ends | None = None
    ) -> Tensor:
        if self.block.causal and self.block.causal[index]:
            rows = replace(rows, lasts=None)
        return super()._attend(index, layer, y, rows, kv, ends=ends)

    # ── weights ──

    def matrices(self) -> list[CudaMatrix]:
        kernels = [each.kernel for pair in self._convolutions for each in pair]
        chosen = [] if self._selector is None else self._selector.matrices()
        return [self.fc, *self._markov.values(), *kernels, *chosen, *super().matrices()]

    def _assemble(self, packer: Packer, max_context: int) -> None:
        self.embedding = packer.matrix("embed") if "embed" in packer else self._target.embedding
        self.head_share = None if "head" in packer else self._target.head_share
        self.head = packer.matrix("head") if "head" in packer else self._target.head
        self.fc, self._context_norm = packer.matrix("fc"), packer.vector("context_norm")
        self.norm = packer.vector("norm")
        self._markov = {name: packer.matrix(f"markov.{name}") for name in FACTORS if f"markov.{name}" in packer}
        self.layers, block = self._packed_layers(packer, max_context), self.block
        count = self.config.num_layers
        self._convolutions = convolutions(packer, block.convolutions, count) if block.convolutions else []
        self._selector = CudaSelector(packer, block.selector.top, ids=self.ids) if block.selector else None

    @torch.inference_mode()
    def profile(self, rows: int, outs: int) -> None:
        """Run the largest passes, to allocate every buffer, and read smaller numbers of rows of every size, so that the
        ways of their products are known. `outs`: twice the number of seats."""
        self.new_kv(0, seats=outs // 2)
        with compiling():
            self._run_largest(rows, outs // 2)
        self._run_largest(rows, outs // 2)
        torch.cuda.synchronize(self.device)

    def _run_largest(self, rows: int, seats: int) -> None:
        block = self.block
        for count in padded_sizes(rows):
            zeros = torch.zeros(count, dtype=torch.int32, device=self.device)
            batch = DeviceBatch(zeros, zeros, zeros, zeros[:2], zeros[:1, None], seats=1, max_rows=1, max_context=1)
            self.read(batch, torch.zeros((count, block.width), dtype=self.dtype, device=self.device))
        zeros = torch.zeros(seats * block.block_size, dtype=torch.int32, device=self.device)
        batch = DeviceBatch(
            tokens=zeros,
            positions=zeros,
            slots=zeros,
            row_starts=block.block_size * torch.arange(seats + 1, dtype=torch.int32, device=self.device),
            page_table=zeros[:seats, None].contiguous(),
            seats=seats,
            max_rows=block.block_size,
            max_context=block.block_size,
            lasts=zeros,
        )
        self._run_rows(batch, block.longest)
        self.logits_after(0, zeros[:seats])


def check_on_cuda(config: BlockConfig) -> None:
    """Raise UnsupportedModel for a network that has no launches."""
    windows = config.decoder.windows or (0,) * config.decoder.num_layers
    causal = config.causal or (False,) * config.decoder.num_layers
    if any(window and not alone for window, alone in zip(windows, causal, strict=True)):
        what = "layers with a window whose rows see later ones"
    elif config.block_size > prefill.MANY_ROWS:  # its kernel takes adjacent positions for granted
        what = f"blocks of {config.block_size} rows, more than {prefill.MANY_ROWS}"
    else:
        return
    raise UnsupportedModel(
        f"the block drafter has {what}, which run on a CPU only; take another drafter, or --device cpu"
    )
