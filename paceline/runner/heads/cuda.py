"""An EAGLE head as a sequence of kernel launches on a CUDA device; `runner.heads.torch` defines its passes.

The first pass of a draft has the rows that the head has yet to read, and begins with a product over their hidden
states. Every further pass has one row for each seat and continues from the last row of that seat. A pass of an EAGLE-3
head with one layer is nine launches: pair, q·k·v, attention with rotation and KV store, o + residual, norm, gate·up,
down + residual, norm, output layer. Only the last row of a seat goes through the output layer.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from paceline.kernels.cuda.compiling import compiling
from paceline.kernels.cuda.formats import CudaMatrix
from paceline.kernels.cuda.norm import embed, norm
from paceline.kernels.cuda.pair import norm_at, pair
from paceline.kernels.reference import rms_norm
from paceline.models.heads import EagleHead
from paceline.models.rope import layer_rope, rope_tables
from paceline.runner.forwards.cuda import CudaDecoder, new_kv
from paceline.runner.forwards.cuda_layers import Packer
from paceline.runner.forwards.device_batch import DeviceBatch, padded_sizes
from paceline.runner.heads.mask_row import MaskRow


class CudaHead(CudaDecoder):
    """Implements Head for rounds on a CUDA device: a head with its weights packed for the kernels.

    `head.weights` is emptied while it is packed."""

    def __init__(self, head: EagleHead, target: CudaDecoder, *, max_context: int) -> None:
        self._network = head.config
        self._target = target
        super().__init__(
            head.config.decoder,
            head.weights,
            max_context=max_context,
            dtype=target.dtype,
            device=target.device,
            pdl=target.pdl,
        )
        self.ids = head.ids.to(device=self.device, dtype=torch.int32)
        self._states = torch.empty(0)  # [rows, hidden] output of the last pass, before the final norm
        self._ends: Tensor | None = None  # int32 [seats + 1] of the first pass: ends of the seats' rows
        self._masked: Tensor | None = None  # [1, hidden] state of drafted positions in P-EAGLE
        if self.mask is not None:
            self._masked = self._fused(self.mask.features[None].to(self.dtype)).clone()

    def new_kv(self, num_pages: int) -> None:
        """Allocate memory for keys and values."""
        self.kv = new_kv(self.config, num_pages=num_pages, dtype=self.dtype, device=self.device)

    def read(self, rows: DeviceBatch, features: Tensor) -> None:
        """Compute keys and values of rows with these hidden states [rows, taps · target's hidden]."""
        self._run(rows, self._fused(features), ends=None, turn=0)

    def first(self, rows: DeviceBatch, features: Tensor) -> Tensor:
        """Begin a draft: read rows with hidden states; return logits [seats, draft vocabulary] after each seat's last.

        Seats without rows get any logits."""
        self.read(rows, features)
        self._ends = rows.row_starts
        return self._logits(rows.seats)

    def further(self, rows: DeviceBatch, turn: int, *, ends: Tensor | None = None) -> Tensor:
        """Continue the draft, and return the logits of every row. Row b continues from row ends[b + 1] - 1 of the last
        pass; without `ends` there is one row for each seat, which continues from the seat's last one."""
        states, last = self._states, self._ends if ends is None else ends
        if self.mask is not None and self._masked is not None:
            rows = replace(rows, tokens=torch.full_like(rows.tokens, self.mask.token))
            states, last = self._masked.expand(len(rows.tokens), -1).contiguous(), None
        elif self._network.norm_output:
            states = self._buffer("carried", len(rows.tokens), self.config.hidden_size)
            norm_at(self._states, last, self.norm, states, eps=self.config.norm_eps, pdl=self.pdl)
            last = None
        self._run(rows, states, ends=last, turn=turn)
        self._ends = None
        return self._logits(len(rows.tokens))

    def _fused(self, features: Tensor) -> Tensor:
        """Compute the states [rows, hidden] of rows with the target's hidden states."""
        if self._network.fuses_tokens:
            return features
        if self._fc_norm is not None:
            parts = features.view(len(features), self._network.feature_norms, -1)
            features = rms_norm(parts, self._fc_norm, self.config.norm_eps).flatten(1)
        states = self._buffer("states", len(features), self.config.hidden_size)
        self.products(features, self.fc, states)
        return states

    def _run(self, rows: DeviceBatch, states: Tensor, *, ends: Tensor | None, turn: int) -> None:
        """Compute the output of all layers for rows that begin with `states`, into memory that this turn's neighbours
        do not use."""
        count, hidden, last = len(rows.tokens), self.config.hidden_size, len(self.layers) - 1
        x, y = self._buffer(f"x{turn % 2}", count, hidden), self._buffer("y", count, hidden)
        inputs = self._fuse(rows, states, x, ends) if self._network.fuses_tokens else self._pair(rows, states, x, ends)
        for index, layer in enumerate(self.layers):
            attended = self._attend(index, layer, inputs, rows, self.kv)
            self._branch(attended, layer.o, x, y, None, layer.mlp_norm)
            gated = self._buffer("gated", count, self.config.intermediate_size)
            self.products(y, layer.gate_up, gated, activation=self.activation)
            if index < last:
                self._branch(gated, layer.down, x, y, None, self.layers[index + 1].attn_norm)
                inputs = y
        self.products(gated, self.layers[last].down, x, residual=x)
        self._states = x

    def _pair(self, rows: DeviceBatch, states: Tensor, x: Tensor, ends: Tensor | None) -> Tensor:
        """Return embeddings and states, normed and side by side [rows, 2 · hidden]: what the first layer of EAGLE-3
        reads. There x begins the residual stream."""
        paired = self._buffer("paired", len(x), 2 * x.shape[1])
        pair(
            rows.tokens,
            self.embedding,
            self._embed_norm,
            states,
            self._state_norm,
            paired,
            x,
            eps=self.config.norm_eps,
            norm_first=self._network.norm_first,
            ends=ends,
            pdl=self.pdl,
        )
        return paired

    def _fuse(self, rows: DeviceBatch, states: Tensor, x: Tensor, ends: Tensor | None) -> Tensor:
        """Compute x, which begins the residual stream; return what the first layer of EAGLE-1 or MTP reads: x, or its
        norm."""
        hidden = x.shape[1]
        y = self._buffer("y", len(x), hidden)
        if self._network.usual_layers:
            self.products(self._pair(rows, states, x, ends), self.fc, x)
            norm(x, self.layers[0].attn_norm, y, eps=self.config.norm_eps, pdl=self.pdl)
            return y
        paired = self._buffer("paired", len(x), 2 * hidden)
        embed(rows.tokens, self.embedding, x, pdl=self.pdl)
        paired[:, :hidden] = x
        paired[:, hidden:] = _at(states, ends)
        self.products(paired, self.fc, x)
        return y.copy_(x)

    def _logits(self, seats: int) -> Tensor:
        last = self._buffer("last", seats, self.config.hidden_size)
        if self._network.state_norm is None:
            last.copy_(_at(self._states, self._ends))
        else:
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
            self.first(batch, torch.zeros((count, self._network.width), dtype=self.dtype, device=self.device))

    def _assemble(self, packer: Packer, max_context: int) -> None:
        config, network = self.config, self._network
        cos, sin = (table.to(self.device) for table in rope_tables(config, *layer_rope(config, 0), max_context + 1))
        self.embedding = packer.matrix("embed") if "embed" in packer else self._target.embedding
        self.fc = packer.matrix("fc")
        if network.state_norm is None:
            packer.put("layers.0.attn_norm", torch.ones(config.hidden_size))  # a place that no kernel reads
        else:
            self._embed_norm, self.norm = packer.vector("embed_norm"), packer.vector("norm")
        own = packer.vector("state_norm") if network.usual_layers else None
        norms = packer.vector("fc_norm") if network.feature_norms else None
        self._fc_norm = None if norms is None else norms.view(network.feature_norms, -1)
        self.mask = MaskRow.of(network, packer.vector("mask") if "mask" in packer else None)
        self.layers = [packer.layer(config, index, cos, sin) for index in range(config.num_layers)]
        self._state_norm = self.layers[0].attn_norm if own is None else own
        self.head_share = None if "head" in packer else self._target.head_share
        self.head = packer.matrix("head") if "head" in packer else self._target.head


def _at(states: Tensor, ends: Tensor | None) -> Tensor:
    """Return rows ends[b + 1] - 1 of states; all of them without `ends`. A seat without rows gets any."""
    return states if ends is None else states.index_select(0, (ends[1:] - 1).clamp_min(0))
