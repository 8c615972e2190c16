"""Sketch: a low-rank approximation of a head's output layer, which selects the outputs to compute exactly.

docs/adr/0013-a-head-computes-a-shortlist.md has the decision and measurements; kernels/cpu/screen.c uses the sketch.

The layer multiplies rows of root mean square 1 by W = weights · norm. If rows are spread equally in all directions, the
best product of rank r projects them onto the r largest singular vectors of W: `down` [r, hidden], then `up` [vocab, r].
The mean over all outputs does not change their order and is subtracted first.

Real rows are not spread equally. Training measures their second moment, and with it fewer directions give a better
approximation: `directions` finds the subspace, the head's file ships it, and `sketch` takes its vectors from there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.cpu.abi import TILE
from paceline.kernels.quant import GROUP, Quantised, quantise

# Measured with the shipped head on two cores (docs/adr/0013-a-head-computes-a-shortlist.md). The FITTED ones are for a
# head whose file ships fitted directions.
RANK_DIVISOR, FITTED_RANK_DIVISOR = 3.0, 3.6  # rank of the sketch = hidden size / this
EXACT_OUTPUTS, FITTED_EXACT_OUTPUTS = 26, 16  # outputs computed exactly in each slice of the vocabulary, at least
MIN_OUTPUTS = 8192  # a layer with fewer outputs has no sketch: all are computed
MAX_INPUTS = 1024  # a layer with more inputs has no sketch: its singular vectors would take too long at load


class Sketch(NamedTuple):
    """A layer as the product of two narrow matrices."""

    down: Quantised  # [r, hidden], 8 bits
    up: Quantised  # [vocab, r], 4 bits


def sketch(weight: Tensor, norm: Tensor, space: Tensor | None = None) -> Sketch | None:
    """Make the sketch of a layer with `weight` [vocab, hidden] behind a norm; None: it would not pay.

    Its directions are in the subspace `space` [r, hidden] if there is one."""
    rank = sketch_rank(weight, space)
    if rank is None:
        return None
    whole = _product(weight, norm)
    basis = torch.eye(len(norm)) if space is None else torch.linalg.qr(space.float().T).Q  # [hidden, r]
    _, vectors = torch.linalg.eigh(basis.T @ (whole.T @ whole) @ basis)
    largest = basis @ vectors[:, -rank:].flip(1)
    down, up = largest.T.contiguous(), whole @ largest
    return Sketch(quantise(down, bits=8, group=GROUP), quantise(up, bits=4, group=GROUP))


def sketch_rank(weight: Tensor, space: Tensor | None) -> int | None:
    """Return the rank of a layer's sketch, by shapes alone; None: a sketch would not pay."""
    rank = _rank(weight, RANK_DIVISOR) if space is None else len(space)
    return rank if _pays(weight, rank) else None


def exact_outputs(space: Tensor | None) -> int:
    """Return how many outputs a sketch computes exactly in each slice of the vocabulary, at least."""
    return EXACT_OUTPUTS if space is None else FITTED_EXACT_OUTPUTS


def directions(weight: Tensor, norm: Tensor, moment: Tensor) -> Tensor | None:
    """Find the `space` for rows with the second moment `moment` [hidden, hidden]; None: a sketch would not pay.

    It is int8 [r, hidden]: only the directions of its vectors matter, not their lengths."""
    rank = _rank(weight, FITTED_RANK_DIVISOR)
    if not _pays(weight, rank):
        return None
    values, vectors = torch.linalg.eigh(moment)
    root = vectors * values.clamp_min(0).sqrt() @ vectors.T
    spread = _product(weight, norm) @ root
    _, vectors = torch.linalg.eigh(spread.T @ spread)
    basis: Tensor = torch.linalg.qr(root @ vectors[:, -rank:]).Q.T
    return (basis / basis.abs().amax(dim=1, keepdim=True) * 127).round().to(torch.int8)


def _rank(weight: Tensor, divisor: float) -> int:
    return int(weight.shape[1] / divisor) // GROUP * GROUP


def _pays(weight: Tensor, rank: int) -> bool:
    outputs, inputs = weight.shape
    return outputs >= MIN_OUTPUTS and not outputs % TILE and inputs <= MAX_INPUTS and rank > 0


def _product(weight: Tensor, norm: Tensor) -> Tensor:
    """Return W = weight · norm [vocab, hidden], less its mean over all outputs."""
    whole = weight * norm
    return whole - whole.mean(dim=0)
