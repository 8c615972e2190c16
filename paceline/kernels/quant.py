"""Quantised weight matrices: the one format behind 8-bit and 4-bit linear layers.

A weight w[n, k] is `scale * q + minimum`, with q an unsigned integer and one (scale, minimum) pair either for each
output channel or for each group of 32 inputs of a channel.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

GROUP = 32


@dataclass(frozen=True, slots=True)
class Quantised:
    """A matrix [n, k] in `bits` bits, before it is packed for a kernel."""

    q: Tensor  # uint8 [n, k], values below 2**bits
    scale: Tensor  # float32 [n, groups]; groups == 1 (per channel) or k // GROUP
    minimum: Tensor  # float32 [n, groups]
    bits: int  # 4 or 8
