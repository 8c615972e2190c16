"""A Forward of plain torch operations: any device, fp32 or bf16, the oracle of the compiled one.

Not bitwise: torch may round a row differently when other rows ride along.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.kernels.base import Batch, KVMemory, Output
from paceline.kernels.noise import pick
from paceline.kernels.quant import Weight
from paceline.kernels.reference import ReferenceBackend, ReferenceKV
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder


class EagerForward:
    """The decoder on the reference backend."""

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
    ) -> None:
        self.vocab_size = config.vocab_size
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

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Output:
        hidden = self.decoder.forward(batch, self.backend)
        logits = self.decoder.logits(hidden[batch.logit_rows.long()], self.backend)  # [outs, vocab]
        return Output(logits=logits, argmax=logits.argmax(dim=-1).to(torch.int32))
