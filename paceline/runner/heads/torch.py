"""An EAGLE head in plain torch, for any device. `models.eagle_config` has its formulas, `runner.heads.protocol` defines
a pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels.base import Batch, Forward, KVMemory, Output
from paceline.kernels.noise import pick
from paceline.kernels.reference import ReferenceBackend, ReferenceKV, embed, rms_norm
from paceline.models.decoder import Decoder
from paceline.models.heads import EagleHead
from paceline.runner.heads.mask_row import MaskRow


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
        layers = head.config.decoder
        self._target = target
        self._dtype, self.device = dtype, device
        self._decoder = Decoder(layers, head.weights, dtype=dtype, device=device)
        self._weights = self._decoder.weights
        mask = self._weights.get("mask")
        self.mask = MaskRow.of(head.config, mask if isinstance(mask, Tensor) else None)
        kv = ReferenceKV(
            layers=layers.num_layers,
            num_pages=num_pages,
            kv_heads=layers.num_kv_heads,
            head_dim=layers.head_dim,
            dtype=dtype,
            device=device,
        )
        self.kv: KVMemory = kv
        self._backend = ReferenceBackend(kv)
        self._last = torch.empty(0)  # [rows, hidden] output of the last pass

    @torch.inference_mode()
    def __call__(self, batch: Batch, *, features: Tensor | None = None, carry: Sequence[int] = ()) -> Output:
        placed = self._placed(batch)
        if features is None and self.mask is not None:
            placed, features = self.mask.rows(placed)
        states = self._carried(carry) if features is None else self._fused(features)
        self._last = self._layers(placed, states)
        logits = self._logits(self._last[placed.logit_rows.long()])  # [outs, draft vocabulary]
        return Output(logits=logits, argmax=logits.argmax(dim=-1).to(torch.int32))

    def pick(self, logits: Tensor, inverse_temperatures: Tensor, keys: Tensor) -> Tensor:
        return pick(logits, inverse_temperatures, keys, ids=self.ids)

    def _carried(self, carry: Sequence[int]) -> Tensor:
        """Return the states g [rows, hidden] of rows that continue from the last pass."""
        states = self._last[list(carry)]
        return self._norm("norm", states) if self.config.norm_output else states

    def _fused(self, features: Tensor) -> Tensor:
        """Return the states g [rows, hidden] of rows with the target's hidden states."""
        features = features.to(device=self.device, dtype=self._dtype)
        if self.config.fuses_tokens:
            return features
        if self.config.feature_norms:
            parts = features.view(len(features), self.config.feature_norms, -1)
            weight = self._vector("fc_norm").view(parts.shape[1:])
            features = rms_norm(parts, weight, self.config.decoder.norm_eps).flatten(1)
        return self._linear("fc", features)

    def _layers(self, batch: Batch, states: Tensor) -> Tensor:
        """Compute the output y [rows, hidden], before the final norm."""
        self._backend.begin(batch)
        angles, embedded, normed = self._decoder.angles(batch.positions), self._embedded(batch.tokens), states
        if self.config.state_norm is not None:
            embedded, normed = self._norm("embed_norm", embedded), self._norm(self.config.state_norm, states)
        inputs = torch.cat([embedded, normed], dim=1)
        if self.config.fuses_tokens:
            x = inputs = self._linear("fc", inputs)
        else:
            x = normed if self.config.norm_first else states
        x = self._decoder.layer(0, x, angles, self._backend, inputs=None if self.config.usual_layers else inputs)
        for index in range(1, self.config.decoder.num_layers):
            x = self._decoder.layer(index, x, angles, self._backend)
        return x

    def _logits(self, y: Tensor) -> Tensor:
        """Compute logits float32 [n, draft vocabulary], on the host."""
        states = self._norm("norm", y) if "norm" in self._weights else y
        logits = self._linear("head", states) if "head" in self._weights else self._target.project(states)
        return logits.float().cpu()

    def _embedded(self, tokens: Tensor) -> Tensor:
        if "embed" in self._weights:
            return embed(tokens, self._weights["embed"], self._dtype)
        return self._target.embed(tokens).to(self._dtype)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self._vector(name), self.config.decoder.norm_eps)

    def _vector(self, name: str) -> Tensor:
        weight = self._weights[name]
        assert isinstance(weight, Tensor), f"{name} is quantised"
        return weight

    def _linear(self, name: str, x: Tensor) -> Tensor:
        bias = self._weights.get(f"{name}.bias")
        assert bias is None or isinstance(bias, Tensor), f"{name}.bias is quantised"
        return self._backend.linear(x, self._weights[name], bias)

    def _placed(self, batch: Batch) -> Batch:
        if str(self.device) == "cpu":
            return batch
        fields = ("tokens", "positions", "slots", "row_starts", "bases", "page_table", "logit_rows")
        return Batch(**{name: getattr(batch, name).to(self.device) for name in fields})
