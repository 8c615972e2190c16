"""min-p, top-k and top-p as one *floor*: the smallest scaled logit of each row that they keep. Ties stay in.

Host and device must agree on the floor to the last bit, since a sequence may move between the two. No machine's own exp
and no order of addition may decide which tokens stay. So probabilities are *masses*: integers, made by single
operations that all machines round alike. This is the host's version, which avoids sorting a vocabulary;
kernels/round_reference.py is the plain reference, and kernels/cuda/sample.py the version for a device.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4  # ln(2) is their sum; LN2_HIGH times an exponent is exact
LOG2_E = 1.44269504
EXPONENTIAL = (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)  # Taylor coefficients, for arguments up to ln(2) / 2
MASS_BITS = 40  # a mass of 1 is 2**40 units: 2**18 tokens of mass up to 1 stay below 2**63
FAINT = -27.0  # distance below the largest logit from which a token has no mass: e**-27 < 2**-38
NOTHING = -30.0  # a distance whose mass is rounded down to 0
ROUGH_ERROR = 4e-6  # relative error: three times the largest one of a rough mass of up to 2**18 tokens
CANDIDATES = 256  # likeliest tokens that nearly always contain the nucleus; sorting the whole vocabulary is 20 x slower


def filter_floor(scaled: Tensor, *, min_p: float, top_k: int, top_p: float) -> np.ndarray:
    """Find the smallest of scaled logits float32 [rows, vocab] that min-p, then top-k, then top-p keep: [rows, 1]."""
    best = scaled.amax(-1, keepdim=True).numpy()  # [rows, 1]
    least, share = np.float32(min_p), np.float32(top_p)  # in the precision that a device has
    floor = best + np.log(least, dtype=np.float64).astype(np.float32) if least > 0 else np.full_like(best, -np.inf)
    if 0 < top_k < scaled.shape[-1]:
        floor = np.maximum(floor, torch.topk(scaled, top_k, dim=-1).values[:, -1:].numpy())
    if share < 1:
        with np.errstate(invalid="ignore"):  # rows of nothing but -inf
            floor = np.maximum(floor, _nucleus_floor(scaled, best, floor, float(share)))
    return floor


def mass(below: np.ndarray) -> np.ndarray:
    """Compute exp of float32 numbers <= 0, int64 in units of 2**-MASS_BITS, by operations that all machines round
    alike."""
    rest = np.where(below > FAINT, below, np.float32(NOTHING))  # also for NaN, which infinite logits make
    power = np.trunc(rest * LOG2_E - 0.5)  # rounds to the nearest, since trunc goes towards 0
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
    """Find the smallest value in the nucleus: the fewest largest values whose mass reaches `top_p` of that of all
    values >= `floor`.

    A rough total is enough for most rows. The exact one is computed where the rough one leaves the nucleus open."""
    vocab, width, total = scaled.shape[-1], CANDIDATES, None
    while True:
        ordered = torch.topk(scaled, min(width, vocab), dim=-1).values.numpy()  # [rows, width]
        masses = np.where(ordered >= floor, mass(ordered - best), 0)
        before = masses.cumsum(-1) - masses
        if width >= vocab or bool((ordered[:, -1:] < floor).all()):  # all values from the floor on are there
            wanted = _share(top_p, masses.sum(-1, keepdims=True))
            break
        if total is None:
            total = _rough_mass_from(scaled, best, floor)
        wanted = _share(top_p, total * (1 + ROUGH_ERROR))
        if bool((before[:, -1:] >= wanted).all()):
            least = _share(top_p, total * (1 - ROUGH_ERROR))
            for row in np.flatnonzero(((before >= least) & (before < wanted)).any(-1)):
                wanted[row] = _share(top_p, _mass_from(scaled[row], best[row], floor[row]))
            break
        width *= 8
    count = (before < wanted).sum(-1, keepdims=True).clip(min=1)
    return np.take_along_axis(ordered, count - 1, axis=-1)


def _share(top_p: float, total: np.ndarray) -> np.ndarray:
    """Compute `top_p` times a total mass, in whole units."""
    return (top_p * total.astype(np.float64)).astype(np.int64)


def _mass_from(scaled: Tensor, best: np.ndarray, floor: np.ndarray) -> np.ndarray:
    """Sum the exact mass of all values of a row [vocab] from the floor on."""
    values = scaled.numpy()
    return np.asarray(mass(values[values >= floor] - best).sum())


def _rough_mass_from(scaled: Tensor, best: np.ndarray, floor: np.ndarray) -> np.ndarray:
    """Sum the mass [rows, 1] of each row's values from the floor on, within ROUGH_ERROR, in a third of the time."""
    masses = (scaled - torch.from_numpy(best)).exp_()
    if (floor > -np.inf).any():
        masses *= scaled >= torch.from_numpy(floor)
    return masses.sum(-1, keepdim=True, dtype=torch.float64).numpy() * 2.0**MASS_BITS
