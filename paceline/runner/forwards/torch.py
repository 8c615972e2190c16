"""The Forward in plain torch, for any device, in fp32 or bf16: the reference that tests compare the compiled one with.

It is not bitwise: torch may round a row differently if the batch has other rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy

import torch
from torch import Tensor

from paceline.kernels.base import Batch, KVMemory, Output
from paceline.kernels.noise import pick
from paceline.kernels.quant import Weight
from paceline.kernels.reference import ReferenceBackend, ReferenceKV
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder


class TorchForward:
    """Implements Forward: the decoder on the reference backend."""

    bitwise = False
    pick = staticmethod(pick)

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        *,
        num_pages: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        taps: Sequence[int] = (),
    ) -> None:
        self.vocab_size = config.vocab_size
        self.taps = taps
        self.decoder = Decoder(config, weights, dtype=dtype, device=device)
        kv = ReferenceKV(
            layers=config.num_layers,
            num_pages=num_pages,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            device=device,
        )
        self.kv: KVMemory = kv
        self.backend = ReferenceBackend(kv)

    def leading(self, layers: int) -> TorchForward:
        """Return the first layers with the last norm and the output layer, on the same weights and KV memory."""
        part = copy(self)
        part.decoder, part.taps = self.decoder.leading(layers), ()
        return part

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Output:
        kept: list[Tensor] = []
        taps = self.taps if batch.features else ()
        hidden = self.decoder.forward(batch, self.backend, taps=taps, kept=kept)
        logits = self.decoder.logits(hidden[batch.logit_rows.long()], self.backend)  # [outs, vocab]
        features = torch.cat(kept, dim=1).float() if kept else None
        states = self.decoder.states(hidden).float() if batch.states else None
        argmax = logits.argmax(dim=-1).to(torch.int32)
        return Output(logits=logits, argmax=argmax, features=features, states=states)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.decoder.embed(tokens)

    @torch.inference_mode()
    def project(self, states: Tensor) -> Tensor:
        return self.decoder.project(states.to(self.decoder.dtype), self.backend)
