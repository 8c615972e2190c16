"""A rough copy of a head's last layer, to find out which of its outputs are worth computing.

The layer multiplies a row of root mean square 1 by W = weights · norm. Of all products with r numbers the best for rows
that point anywhere are those along the r largest singular vectors of W: down [r, hidden], then up [vocab, r]. What all
outputs have in common says nothing of their order, and is left out.

Rows do not point anywhere. Where it is known how they are spread, as a head's training knows, fewer directions say
more: the head's file then names the space that they are taken from (`directions`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.cpu.abi import TILE
from paceline.kernels.quant import GROUP, Quantised, quantise

PART, FITTED_PART = 3.0, 3.6  # of the dimensions, one in so many; where it is known how rows are spread
FEW, FITTED_FEW = 26, 16  # outputs of a slice that are computed as they are, at least
LEAST_OUTPUTS = 8192  # of fewer all are computed
MOST_INPUTS = 1024  # of more the singular vectors take longer than anybody waits


class Sketch(NamedTuple):
    down: Quantised
    up: Quantised
    few: int  # outputs of a slice to be computed as they are, at least


def sketch(weight: Tensor, norm: Tensor, space: Tensor | None = None) -> Sketch | None:
    """Of a layer with `weight` [vocab, hidden] behind a norm, with directions from a `space` [r, hidden] or from
    anywhere; None: it is not worth it."""
    rank = _rank(weight, PART) if space is None else len(space)
    if not _is_worth_it(weight, rank):
        return None
    whole = _product(weight, norm)
    basis = torch.eye(len(norm)) if space is None else torch.linalg.qr(space.float().T).Q  # [hidden, r]
    _, vectors = torch.linalg.eigh(basis.T @ (whole.T @ whole) @ basis)
    largest = basis @ vectors[:, -rank:].flip(1)
    down, up = largest.T.contiguous(), whole @ largest
    few = FEW if space is None else FITTED_FEW
    return Sketch(quantise(down, bits=8, group=GROUP), quantise(up, bits=4, group=GROUP), few)


def directions(weight: Tensor, norm: Tensor, moment: Tensor) -> Tensor | None:
    """The `space` for rows whose products with themselves are `moment` [hidden, hidden] in the mean, in int8: only
    where its vectors point counts."""
    rank = _rank(weight, FITTED_PART)
    if not _is_worth_it(weight, rank):
        return None
    values, vectors = torch.linalg.eigh(moment)
    root = vectors * values.clamp_min(0).sqrt() @ vectors.T
    spread = _product(weight, norm) @ root
    _, vectors = torch.linalg.eigh(spread.T @ spread)
    basis: Tensor = torch.linalg.qr(root @ vectors[:, -rank:]).Q.T
    return (basis / basis.abs().amax(dim=1, keepdim=True) * 127).round().to(torch.int8)


def _rank(weight: Tensor, part: float) -> int:
    return int(weight.shape[1] / part) // GROUP * GROUP


def _is_worth_it(weight: Tensor, rank: int) -> bool:
    outputs, inputs = weight.shape
    return outputs >= LEAST_OUTPUTS and not outputs % TILE and inputs <= MOST_INPUTS and rank > 0


def _product(weight: Tensor, norm: Tensor) -> Tensor:
    whole = weight * norm
    return whole - whole.mean(dim=0)
