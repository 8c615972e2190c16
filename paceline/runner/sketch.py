"""A rough copy of a head's last layer, to find out which of its outputs are worth computing.

The layer multiplies a row of root mean square 1 by W = weights · norm. Of all products with r numbers the best for rows
that point anywhere are those along the r largest singular vectors of W: down [r, hidden], then up [vocab, r]. What all
outputs have in common says nothing of their order, and is left out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.cpu.layout import LANES
from paceline.kernels.quant import GROUP, Quantised, quantise

PART = 3  # of the dimensions, one in so many
LEAST_OUTPUTS = 8192  # of fewer all are computed
MOST_INPUTS = 1024  # of more the singular vectors take longer than anybody waits


class Sketch(NamedTuple):
    down: Quantised
    up: Quantised


def sketch(weight: Tensor, norm: Tensor) -> Sketch | None:
    """Of a layer with `weight` [vocab, hidden] behind a norm; None: it is not worth it."""
    outputs, inputs = weight.shape
    rank = inputs // PART // GROUP * GROUP
    if outputs < LEAST_OUTPUTS or outputs % LANES or inputs > MOST_INPUTS or not rank:
        return None
    whole = weight * norm
    whole -= whole.mean(dim=0)
    _, vectors = torch.linalg.eigh(whole.T @ whole)
    largest = vectors[:, -rank:].flip(1)
    down, up = largest.T.contiguous(), whole @ largest
    return Sketch(quantise(down, bits=8, group=GROUP), quantise(up, bits=4, group=GROUP))
