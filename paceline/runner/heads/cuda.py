"""An EAGLE-3 head as a sequence of kernel launches on a CUDA device; `runner.heads.torch` defines its passes.

The first pass of a draft has the rows that the head has yet to read, and begins with a product over their hidden
states. Every further pass has one row for each seat and continues from the last row of that seat. A pass is nine
launches: pair, q·k·v, attention with rotation and KV store, o + residual, norm, gate·up, down + residual, norm, output
layer. Only the last row of a seat goes through the output layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.cuda.compiling import compiling
from paceline.kernels.cuda.formats import CudaMatrix
from paceline.kernels.cuda.pair import norm_at, pair
from paceline.models.heads import EagleHead
from paceline.models.rope import layer_rope, rope_tables
from paceline.runner.forwards.cuda import CudaDecoder, new_kv
from paceline.runner.forwards.cuda_layers import CudaLayer, Packer
from paceline.runner.forwards.device_batch import DeviceBatch, padded_sizes


class CudaHead(CudaDecoder):
    """Implements Head for rounds on a CUDA device: a head with its weights packed for the kernels.

    `head.weights` is emptied while it is packed."""

    def __init__(self, head: EagleHead, target: CudaDecoder, *, max_context: int) -> None:
        self._norm_first = head.config.norm_first
        self._target = target
        layer = head.config.layer
        super().__init__(
            layer, head.weights, max_context=max_context, dtype=target.dtype, device=target.device, pdl=target.pdl
        )
        self.ids = head.ids.to(device=self.device, dtype=torch.int32)
        self._states = torch.empty(0)  # [rows, hidden] output of the last pass, before the final norm
        self._ends: Tensor | None = None  # int32 [seats + 1] of the first pass: ends of the seats' rows

    def new_kv(self, num_pages: int) -> None:
        """Allocate memory for keys and values."""
        self.kv = new_kv(self.config, num_pages=num_pages, dtype=self.dtype, device=self.device)

    def read(self, rows: DeviceBatch, features: Tensor) -> None:
        """Compute keys and values of rows with these hidden states [rows, 3 · target's hidden]."""
        states = self._buffer("states", len(features), self.config.hidden_size)
        self.products(features, self.fc, states)
        self._layer_of(rows, states, ends=None, turn=0)

    def first(self, rows: DeviceBatch, features: Tensor) -> Tensor:
        """Begin a draft: read rows with hidden states; return logits [seats, draft vocabulary] after each seat's last.

        Seats without rows get any logits."""
        self.read(rows, features)
        self._ends = rows.row_starts
        return self._logits(rows.seats)

    def further(self, rows: DeviceBatch, turn: int, *, ends: Tensor | None = None) -> Tensor:
        """Continue the draft, and return the logits of every row. Row b continues from row ends[b + 1] - 1 of the last
        pass; without `ends` there is one row for each seat, which continues from the seat's last one."""
        self._layer_of(rows, self._states, ends=self._ends if ends is None else ends, turn=turn)
        self._ends = None
        return self._logits(len(rows.tokens))

    def _layer_of(self, rows: DeviceBatch, states: Tensor, *, ends: Tensor | None, turn: int) -> None:
        """Compute the layer's output for rows that begin with `states`, into memory that this turn's neighbours do not
        use."""
        count, hidden, layer = len(rows.tokens), self.config.hidden_size, self.layers[0]
        x, y = self._buffer(f"x{turn % 2}", count, hidden), self._buffer("y", count, hidden)
        paired = self._buffer("paired", count, 2 * hidden)
        pair(
            rows.tokens,
            self.embedding,
            self._embed_norm,
            states,
            layer.attn_norm,
            paired,
            x,
            eps=self.config.norm_eps,
            norm_first=self._norm_first,
            ends=ends,
            pdl=self.pdl,
        )
        attended = self._attend(0, layer, paired, rows, self.kv)
        self._branch(attended, layer.o, x, y, None, layer.mlp_norm)
        gated = self._buffer("gated", count, self.config.intermediate_size)
        self.products(y, layer.gate_up, gated, activation=self.activation)
        self.products(gated, layer.down, x, residual=x)
        self._states = x

    def _logits(self, seats: int) -> Tensor:
        last = self._buffer("last", seats, self.config.hidden_size)
        norm_at(self._states, self._ends, self.norm, last, eps=self.config.norm_eps, pdl=self.pdl)
        out = self._buffer("logits", seats, self.head.outputs, torch.float32)
        self.products(last, self.head, out)
        return out

    def matrices(self) -> list[CudaMatrix]:
        return [self.fc, *super().matrices()]

    @torch.inference_mode()
    def profile(self, rows: int, outs: int) -> None:
        """Run the largest passes, to allocate every buffer, and smaller ones of every size, so that the ways of their
        products are known."""
        self.new_kv(0)
        with compiling():
            self._run_largest(rows, outs)
        self._run_largest(rows, outs)
        torch.cuda.synchronize(self.device)

    def _run_largest(self, rows: int, outs: int) -> None:
        for count, seats in (*((size, 1) for size in padded_sizes(rows)), (outs, outs // 2)):
            zeros = torch.zeros(count, dtype=torch.int32, device=self.device)
            starts = torch.arange(seats + 1, dtype=torch.int32, device=self.device)
            tables = zeros[:seats, None].contiguous()
            batch = DeviceBatch(zeros, zeros, zeros, starts, tables, seats=seats, max_rows=1, max_context=1)
            self.first(batch, torch.zeros((count, self.fc.inputs), dtype=self.dtype, device=self.device))

    def _assemble(self, packer: Packer, max_context: int) -> None:
        config = self.config
        cos, sin = rope_tables(config, *layer_rope(config, 0), max_context + 1)
        self.embedding = packer.matrix("embed") if "embed" in packer else self._target.embedding
        self._embed_norm = packer.vector("embed_norm")
        self.fc = packer.matrix("fc")
        self.layers = [
            CudaLayer(
                attn_norm=packer.vector("hidden_norm"),
                qkv=packer.matrix("q", "k", "v"),
                q_norm=None,
                k_norm=None,
                o=packer.matrix("o"),
                post_attn_norm=None,
                mlp_norm=packer.vector("mlp_norm"),
                gate_up=packer.matrix("gate", "up", gated=True),
                down=packer.matrix("down"),
                post_mlp_norm=None,
                window=0,
                cos=cos.to(self.device),
                sin=sin.to(self.device),
            )
        ]
        self.norm = packer.vector("norm")
        self.head = packer.matrix("head")
