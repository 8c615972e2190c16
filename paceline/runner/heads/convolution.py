"""Convolutions of DFlash2: short, causal, over the rows of a block, with kernels that depend on the row.

    before   x'[i] = Σ_t (base[0, t] + δ[i, 0, t]) · x[i - t]     input of attention or MLP
    after    y'[i] = Σ_t (base[1, t] + δ[i, 1, t]) · y[i - t]     its output

Rows before the block are zero. One product of the input x makes δ, for both sides, one value for a group of channels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from paceline.models.block_config import Convolutions


def around(
    x: Tensor, base: Tensor, deltas: Tensor, config: Convolutions, *, rows: int
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Convolve the inputs x [blocks * rows, hidden]; return them, and a function for the outputs.

    `base` is float32 [2 * taps, hidden], `deltas` [blocks * rows, 2 * taps * groups]."""
    sides, both = base.view(2, config.taps, -1), deltas.view(len(x), 2, config.taps, -1)
    return (
        _convolve(x, sides[0], both[:, 0], config.group, rows),
        lambda y: _convolve(y, sides[1], both[:, 1], config.group, rows),
    )


def _convolve(x: Tensor, base: Tensor, deltas: Tensor, group: int, rows: int) -> Tensor:
    """Convolve x [blocks * rows, hidden] by base [taps, hidden] and deltas [blocks * rows, taps, groups]."""
    blocks = x.view(-1, rows, x.shape[1])
    out = torch.zeros(x.shape, dtype=base.dtype, device=x.device)
    for tap in range(len(base)):
        earlier = functional.pad(blocks, (0, 0, tap, 0))[:, :rows].reshape(x.shape)
        out += (base[tap] + deltas[:, tap, :, None].expand(-1, -1, group).reshape(x.shape)) * earlier
    return out.to(x.dtype)
