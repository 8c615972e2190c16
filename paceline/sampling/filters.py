"""min-p, top-k and top-p as one *floor*: the smallest scaled logit that they leave, of each row. Ties stay in.

Host and device must agree on it to the last bit, for a sequence may move between the two, and no machine's own exp or
order of addition may decide which tokens stay. So probabilities are *masses*: integers, made by single operations that
all machines round alike. This is the host's side, where sorting a vocabulary is slow; kernels/round_reference.py says
the same in the plainest way, and kernels/cuda/sample.py is the device's.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4  # ln(2) is their sum; LN2_HIGH times an exponent is exact
LOG2_E = 1.44269504
EXPONENTIAL = (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)  # Taylor's, for arguments up to ln(2) / 2
MASS_BITS = 40  # a mass of 1 is 2**40 units: 2**18 tokens of mass up to 1 stay below 2**63
FAINT = -27.0  # e**-27 < 2**-38: what is further below the largest logit has no mass
NOTHING = -30.0  # whose mass is rounded down to none
ROUGHLY = 4e-6  # three times how far rough masses can be off, of up to 2**18 tokens
CANDIDATES = 256  # nearly always the nucleus is among so many: sorting the whole vocabulary is 20 times slower


def filter_floor(scaled: Tensor, *, min_p: float, top_k: int, top_p: float) -> np.ndarray:
    """The smallest value [rows, 1] of scaled logits float32 [rows, vocab] that the filters leave, in this order."""
    best = scaled.amax(-1, keepdim=True).numpy()  # [rows, 1]
    least, share = np.float32(min_p), np.float32(top_p)  # as a device has them
    floor = best + np.log(least, dtype=np.float64).astype(np.float32) if least > 0 else np.full_like(best, -np.inf)
    if 0 < top_k < scaled.shape[-1]:
        floor = np.maximum(floor, torch.topk(scaled, top_k, dim=-1).values[:, -1:].numpy())
    if share < 1:
        with np.errstate(invalid="ignore"):  # rows of nothing but -inf
            floor = np.maximum(floor, _nucleus_floor(scaled, best, floor, float(share)))
    return floor


def mass(below: np.ndarray) -> np.ndarray:
    """exp of float32 numbers <= 0 in units of 2**-MASS_BITS, int64; single operations that all machines round alike."""
    rest = np.where(below > FAINT, below, np.float32(NOTHING))  # NaN too: what is infinite has no mass
    power = np.trunc(rest * LOG2_E - 0.5)  # towards 0, so that this rounds to the nearest
    rest -= power * LN2_HIGH
    rest -= power * LN2_LOW
    p = rest * EXPONENTIAL[0]
    p += EXPONENTIAL[1]
    for coefficient in EXPONENTIAL[2:]:
        p *= rest
        p += coefficient
    unit = power.astype(np.int32)
    unit += 127 + MASS_BITS
    unit <<= 23
    p *= unit.view(np.float32)
    return p.astype(np.int64)


def _nucleus_floor(scaled: Tensor, best: np.ndarray, floor: np.ndarray, top_p: float) -> np.ndarray:
    """The smallest value of the smallest set of largest ones whose mass reaches `top_p` of all from `floor` on.

    That mass is needed to the last unit only where a rough one leaves it open which set it is."""
    vocab, width, roughly = scaled.shape[-1], CANDIDATES, None
    while True:
        ordered = torch.topk(scaled, min(width, vocab), dim=-1).values.numpy()  # [rows, width]
        masses = np.where(ordered >= floor, mass(ordered - best), 0)
        before = masses.cumsum(-1) - masses
        if width >= vocab or bool((ordered[:, -1:] < floor).all()):  # there is nothing else
            wanted = _share(top_p, masses.sum(-1, keepdims=True))
            break
        if roughly is None:
            roughly = _rough_mass_from(scaled, best, floor)
        wanted = _share(top_p, roughly * (1 + ROUGHLY))
        if bool((before[:, -1:] >= wanted).all()):
            least = _share(top_p, roughly * (1 - ROUGHLY))
            for row in np.flatnonzero(((before >= least) & (before < wanted)).any(-1)):
                wanted[row] = _share(top_p, _mass_from(scaled[row], best[row], floor[row]))
            break
        width *= 8
    count = (before < wanted).sum(-1, keepdims=True).clip(min=1)
    return np.take_along_axis(ordered, count - 1, axis=-1)


def _share(top_p: float, total: np.ndarray) -> np.ndarray:
    return (top_p * total.astype(np.float64)).astype(np.int64)


def _mass_from(scaled: Tensor, best: np.ndarray, floor: np.ndarray) -> np.ndarray:
    """The mass of all values of a row [vocab] from the floor on."""
    values = scaled.numpy()
    return np.asarray(mass(values[values >= floor] - best).sum())


def _rough_mass_from(scaled: Tensor, best: np.ndarray, floor: np.ndarray) -> np.ndarray:
    """The same of all rows [rows, 1], to within ROUGHLY, in a third of the time."""
    masses = (scaled - torch.from_numpy(best)).exp_()
    if (floor > -np.inf).any():
        masses *= scaled >= torch.from_numpy(floor)
    return masses.sum(-1, keepdim=True, dtype=torch.float64).numpy() * 2.0**MASS_BITS
