"""An EAGLE-3 head in plain torch, for any device. `runner.heads.protocol` defines a pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels.base import Batch, Forward, KVMemory, Output
from paceline.kernels.noise import pick
from paceline.kernels.reference import ReferenceBackend, ReferenceKV, embed, rms_norm, rope
from paceline.models.decoder import activate, place
from paceline.models.heads import EagleHead
from paceline.models.rope import layer_rope, rope_frequencies, turns


class TorchHead:
    """Implements HeadForward. Rows are computed on `device`; logits are on the host."""

    def __init__(
        self,
        head: EagleHead,
        target: Forward,
        *,
        num_pages: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config, self.ids = head.config, head.ids
        layer = head.config.layer
        self._target = target
        self._dtype, self.device = dtype, device
        self._weights = {name: place(weight, dtype=dtype, device=device) for name, weight in head.weights.items()}
        self._frequencies = rope_frequencies(layer.head_dim, *layer_rope(layer, 0)).to(device)
        kv = ReferenceKV(
            layers=1,
            num_pages=num_pages,
            kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            dtype=dtype,
            device=device,
        )
        self.kv: KVMemory = kv
        self._backend = ReferenceBackend(kv)
        self._last = torch.empty(0)  # [rows, hidden] output of the last pass

    @torch.inference_mode()
    def __call__(self, batch: Batch, *, features: Tensor | None = None, carry: Sequence[int] = ()) -> Output:
        placed = self._placed(batch)
        if features is None:
            hidden = self._last[list(carry)]
        else:
            hidden = self._linear("fc", features.to(device=self.device, dtype=self._dtype))
        self._last = self._layer(placed, hidden)
        outs = self._norm("norm", self._last[placed.logit_rows.long()])
        logits = self._linear("head", outs).float().cpu()  # [outs, draft vocabulary]
        return Output(logits=logits, argmax=logits.argmax(dim=-1).to(torch.int32))

    def pick(self, logits: Tensor, inverse_temperatures: Tensor, keys: Tensor) -> Tensor:
        return pick(logits, inverse_temperatures, keys, ids=self.ids)

    def _layer(self, batch: Batch, hidden: Tensor) -> Tensor:
        """Compute the layer's output y [rows, hidden], before the final norm; see `models.heads`."""
        layer = self.config.layer
        self._backend.begin(batch)
        normed = self._norm("hidden_norm", hidden)
        if self.config.norm_first:
            hidden = normed
        paired = torch.cat([self._norm("embed_norm", self._embedded(batch.tokens)), normed], dim=1)
        q, k, v = (self._linear(name, paired).view(len(paired), -1, layer.head_dim) for name in "qkv")
        angles = turns(batch.positions, self._frequencies)
        self._backend.store(0, rope(k, *angles), v)
        attended = self._backend.attend(0, rope(q, *angles), window=0, scale=layer.head_dim**-0.5)
        x = hidden + self._linear("o", attended.flatten(1))
        normed = self._norm("mlp_norm", x)
        gated = activate(self._linear("gate", normed), layer.activation) * self._linear("up", normed)
        return x + self._linear("down", gated)

    def _embedded(self, tokens: Tensor) -> Tensor:
        if "embed" in self._weights:
            return embed(tokens, self._weights["embed"], self._dtype)
        return self._target.embed(tokens).to(self._dtype)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self._weights[name]
        assert isinstance(weight, Tensor), f"{name} is quantised"
        return rms_norm(x, weight, self.config.layer.norm_eps)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return self._backend.linear(x, self._weights[name])

    def _placed(self, batch: Batch) -> Batch:
        if str(self.device) == "cpu":
            return batch
        fields = ("tokens", "positions", "slots", "row_starts", "bases", "page_table", "logit_rows")
        return Batch(**{name: getattr(batch, name).to(self.device) for name in fields})
