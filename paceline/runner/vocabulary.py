"""Vocabularies of one family that differ in their padding: a draft model's tokens and logits beside the target's.

    target   0 ................. 31999 │ padding to 32064
    drafter  0 ................. 31999 │ padding to 32016        padding has no meaning in either

The padding is never drawn by a target that was trained on real text, but a request may name such a token.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from paceline.kernels.base import Batch


def fit_tokens(batch: Batch, *, vocab_size: int, model_vocab_size: int) -> Batch:
    """Replace tokens that the model has no embedding for by its last token; the draft need not be right."""
    if model_vocab_size >= vocab_size:
        return batch
    return replace(batch, tokens=batch.tokens.clamp(max=model_vocab_size - 1))


def fit_logits(logits: Tensor, *, vocab_size: int) -> Tensor:
    """Bring logits [rows, model's vocabulary] to the target's: cut the excess, or fill up with impossible tokens."""
    missing = vocab_size - logits.shape[1]
    if missing > 0:
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
    return logits[:, :vocab_size] if missing < 0 else logits
