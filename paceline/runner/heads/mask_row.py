"""The input of a drafted position in P-EAGLE: one token and one vector of features, the same for every position.

The row of a drafted position depends on no token drafted before it, so one pass computes all of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.base import Batch
from paceline.models.eagle_config import EagleConfig


class MaskRow(NamedTuple):
    token: int
    features: Tensor  # float32 [width]

    @classmethod
    def of(cls, config: EagleConfig, features: Tensor | None) -> MaskRow | None:
        """Return the input of a head's drafted positions; None: they continue from the positions before them."""
        if config.mask_token is None or features is None:
            return None
        return cls(config.mask_token, features)

    def rows(self, batch: Batch) -> tuple[Batch, Tensor]:
        """Make every row of a batch that of a drafted position; return it with its features."""
        count = len(batch.tokens)
        tokens = torch.full_like(batch.tokens, self.token)
        return replace(batch, tokens=tokens), self.features.expand(count, -1).contiguous()
