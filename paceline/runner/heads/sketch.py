"""Sketch: a low-rank approximation of the output layer of a drafter, which selects the outputs to compute exactly.

docs/adr/0013-a-head-computes-a-shortlist.md has the decision and measurements; kernels/cpu/screen.c uses the sketch.

The layer multiplies rows of root mean square 1 by W = weights · norm. If rows are spread equally in all directions, the
best product of rank r projects them onto the r largest singular vectors of W: `down` [r, hidden], then `up` [vocab, r].
The mean over all outputs does not change their order and is subtracted first.

Real rows are not spread equally. If their second moment is known, fewer directions give a better approximation:
`directions` finds the subspace, and `sketch` takes its vectors from there. The file of a head ships the subspace, for
which training measures the moment. For a model it is measured when its weights are packed (`runner.loading.shortlist`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.cpu.abi import TILE, Format
from paceline.kernels.cpu.pack import Layout, Pack
from paceline.kernels.quant import GROUP, Quantised, quantise

# Measured with the shipped head on two cores (docs/adr/0013-a-head-computes-a-shortlist.md). The FITTED ones are for
# fitted directions.
RANK_DIVISOR, FITTED_RANK_DIVISOR = 3.0, 3.6  # rank of the sketch = hidden size / this
EXACT_OUTPUTS, FITTED_EXACT_OUTPUTS = 26, 16  # outputs computed exactly in each slice of the vocabulary, at least
MIN_OUTPUTS = 8192  # a layer with fewer outputs has no sketch: all are computed
MAX_INPUTS = 1024  # a layer with more inputs has no sketch: its singular vectors would take too long at load
BLOCK_ROWS = 8192  # rows of a layer that are converted to float at a time
DOWN, UP, EXACT = "sketch.down", "sketch.up", "sketch.exact"  # names in a pack


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
    mean, gram = _moments(weight, norm)
    basis = torch.eye(len(norm)) if space is None else torch.linalg.qr(space.float().T).Q  # [hidden, r]
    _, vectors = torch.linalg.eigh(basis.T @ gram @ basis)
    largest = basis @ vectors[:, -rank:].flip(1)
    up = torch.cat([(block - mean) @ largest for block in _blocks(weight, norm)])
    return Sketch(quantise(largest.T.contiguous(), bits=8, group=GROUP), quantise(up, bits=4, group=GROUP))


def lay_out_sketch(layout: Layout, weight: Tensor, rank: int | None) -> None:
    """Add the places of a layer's sketch and exact rows; None: a sketch would not pay. `weight` may be without data."""
    if rank is not None:
        outputs, inputs = weight.shape
        layout.tiles((DOWN, Format.GROUP8, rank, inputs))
        layout.tiles((UP, Format.GROUP4, outputs, rank))
        layout.rows(EXACT, outputs, inputs)


def write_sketch(pack: Pack, weight: Tensor, norm: Tensor, space: Tensor | None) -> None:
    """Write the sketch and the exact rows of a layer to their places."""
    rough = sketch(weight, norm, space)
    assert rough is not None, "a sketch that was laid out"
    pack.write(DOWN, rough.down)
    pack.write(UP, rough.up)
    pack.write_in_8_bits(EXACT, weight)


def sketch_rank(weight: Tensor, space: Tensor | None) -> int | None:
    """Return the rank of a layer's sketch, by shapes alone; None: a sketch would not pay."""
    rank = _rank(weight, RANK_DIVISOR) if space is None else len(space)
    return rank if _pays(weight, rank) else None


def fitted_rank(weight: Tensor) -> int | None:
    """Return the rank of the sketch that `directions` gives a layer, by shapes alone; None: it would not pay."""
    rank = _rank(weight, FITTED_RANK_DIVISOR)
    return rank if _pays(weight, rank) else None


def exact_outputs(space: Tensor | None) -> int:
    """Return how many outputs a sketch computes exactly in each slice of the vocabulary, at least."""
    return EXACT_OUTPUTS if space is None else FITTED_EXACT_OUTPUTS


def directions(weight: Tensor, norm: Tensor, moment: Tensor) -> Tensor | None:
    """Find the `space` for rows with the second moment `moment` [hidden, hidden]; None: a sketch would not pay.

    It is int8 [r, hidden]: only the directions of its vectors matter, not their lengths."""
    rank = fitted_rank(weight)
    if rank is None:
        return None
    values, vectors = torch.linalg.eigh(moment)
    root = vectors * values.clamp_min(0).sqrt() @ vectors.T
    _, vectors = torch.linalg.eigh(root @ _moments(weight, norm)[1] @ root)
    basis: Tensor = torch.linalg.qr(root @ vectors[:, -rank:]).Q.T
    return (basis / basis.abs().amax(dim=1, keepdim=True) * 127).round().to(torch.int8)


def _rank(weight: Tensor, divisor: float) -> int:
    return int(weight.shape[1] / divisor) // GROUP * GROUP


def _pays(weight: Tensor, rank: int) -> bool:
    outputs, inputs = weight.shape
    return outputs >= MIN_OUTPUTS and not outputs % TILE and inputs <= MAX_INPUTS and rank > 0


def _blocks(weight: Tensor, norm: Tensor) -> Iterator[Tensor]:
    """Yield W = weight · norm [vocab, hidden], some rows at a time."""
    for block in torch.split(weight, BLOCK_ROWS):
        yield block.float() * norm


def _moments(weight: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of W over all outputs, and the product of W less its mean with itself [hidden, hidden]."""
    total, gram = torch.zeros(len(norm)), torch.zeros((len(norm), len(norm)))
    for block in _blocks(weight, norm):
        total += block.sum(dim=0)
        gram += block.T @ block
    mean = total / len(weight)
    return mean, gram - len(weight) * mean[:, None] * mean
