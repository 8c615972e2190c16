"""Filters of draws on a CUDA device: find the smallest logit that top-k, top-p and min-p leave, and the best above.

A floor is found by bisection over float32 bit patterns, until it leaves exactly the logits that top-k or top-p keep.
Counts and masses are integers, so that neither the order of logits nor the number of rows can change a token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.cuda.noise import LN2_HIGH as _LN2_HIGH
from paceline.kernels.cuda.noise import LN2_LOW as _LN2_LOW
from paceline.kernels.cuda.noise import gumbel
from paceline.kernels.round_reference import EXPONENTIAL, FAINT, LOG2_E, MASS_BITS

PART = 256  # tokens of a part; the k-th largest maximum of the parts is a lower bound of the k-th largest logit
REACH = 10.0  # nats; with top-p and no top-k, the list has the logits at most this far below the largest

_PART, _REACH, _LOG2_E = (tl.constexpr(value) for value in (PART, REACH, LOG2_E))
_NONE = tl.constexpr(0x7FFFFFFF)  # larger than any token
_LOWEST = tl.constexpr(float("-inf"))
_E0, _E1, _E2, _E3, _E4, _E5, _E6 = (tl.constexpr(value) for value in EXPONENTIAL)
_FAINT, _MASS_BIAS = tl.constexpr(FAINT), tl.constexpr(127 + MASS_BITS)


@triton.jit
def bounds_of(maxima, vocab, k, p, least, PARTS: tl.constexpr):
    """Find the largest logit of a row, the floor of min-p, and the smallest logit that belongs in the list."""
    part = tl.arange(0, PARTS)
    tops = tl.load(maxima + part, mask=part < tl.cdiv(vocab, _PART), other=_LOWEST)
    best = tl.max(tops, axis=0)
    margin = tl.log(tl.where(least > 0, least, 1.0).to(tl.float64)).to(tl.float32)
    floor = tl.where(least > 0, best + margin, _LOWEST)
    bound = tl.where(p < 1, best - _REACH, _LOWEST)  # min-p alone: all logits above its floor belong in the list
    if (k > 0) & (k < vocab):  # k parts reach the bound, so at least k logits do
        low, high = _image(tl.full((), _LOWEST, tl.float32)), _image(best) + 1
        while high - low > 1:
            middle = (low + high) >> 1
            low, high = _halve(low, high, tl.sum((tops >= _value(middle)).to(tl.int32), axis=0), k)
        bound = _value(low)
    return best, floor, tl.maximum(bound, floor)


@triton.jit
def floor_of(source, length, scale, best, floor, k, p, mass, BLOCK: tl.constexpr, LISTED: tl.constexpr):
    """Find the smallest logit at or above `floor` that top-k and top-p leave."""
    if k > 0:
        low, high = _image(floor), _image(best) + 1
        while high - low > 1:
            middle = (low + high) >> 1
            low, high = _halve(low, high, _count_from(source, length, scale, _value(middle), BLOCK, LISTED), k)
        floor = _value(low)
        if p < 1:
            mass = mass_from(source, length, scale, best, floor, BLOCK, LISTED)
    if p < 1:
        wanted = share_of(p, mass)
        low, high = _image(floor), _image(best) + 1
        while high - low > 1:
            middle = (low + high) >> 1
            reached = mass_from(source, length, scale, best, _value(middle), BLOCK, LISTED)
            low, high = _halve(low, high, reached, wanted)
        floor = _value(low)
    return floor


@triton.jit
def _halve(low, high, reached, wanted):
    """Choose the half of [low, high) to continue in; `low` always reaches `wanted`. An exact match ends the search."""
    middle = (low + high) >> 1
    after = tl.where(reached == wanted, middle + 1, high)
    return tl.where(reached >= wanted, middle, low), tl.where(reached >= wanted, after, middle)


@triton.jit
def read(source, at, length, scale, LISTED: tl.constexpr):
    value = tl.load(source + at, mask=at < length, other=_LOWEST)
    if not LISTED:
        value = clean(value) * scale
    return value


@triton.jit
def _count_from(source, length, scale, floor, BLOCK: tl.constexpr, LISTED: tl.constexpr):
    """Count the logits at or above a finite floor."""
    count = tl.zeros((), tl.int32)
    for start in range(0, length, BLOCK):
        value = read(source, start + tl.arange(0, BLOCK), length, scale, LISTED)
        count += tl.sum((value >= floor).to(tl.int32), axis=0)
    return count


@triton.jit
def mass_from(source, length, scale, best, floor, BLOCK: tl.constexpr, LISTED: tl.constexpr):
    """Sum the mass of the logits at or above a floor."""
    mass = tl.zeros((), tl.int64)
    for start in range(0, length, BLOCK):
        value = read(source, start + tl.arange(0, BLOCK), length, scale, LISTED)
        mass += tl.sum(tl.where(value >= floor, mass_of(value - best), 0), axis=0)
    return mass


@triton.jit
def share_of(p, mass):
    return (p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64)


@triton.jit
def _image(value):
    """Map a float32 number to an int64 with the same order."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(image):
    """Invert `_image`."""
    bits = image.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def mass_of(below):
    """Compute `round_reference.mass`."""
    seen = below > _FAINT
    below = tl.where(seen, below, 0.0)
    exponent = (below * _LOG2_E - 0.5).to(tl.int32)
    power = exponent.to(tl.float32)
    rest = below - power * _LN2_HIGH - power * _LN2_LOW
    p = _E0 * rest + _E1
    p = p * rest + _E2
    p = p * rest + _E3
    p = p * rest + _E4
    p = p * rest + _E5
    p = p * rest + _E6
    unit = ((exponent + _MASS_BIAS) << 23).to(tl.float32, bitcast=True)
    return tl.where(seen, (p * unit).to(tl.int64), 0)


@triton.jit
def clean(value):
    """Convert to float32, and NaN to -inf."""
    value = value.to(tl.float32)
    return tl.where(value == value, value, _LOWEST)


@triton.jit
def is_filtered(scale, k, p, least, vocab):
    return (scale > 0) & (((k > 0) & (k < vocab)) | (p < 1) | (least > 0))


@triton.jit
def best_of(
    source, names, ids, length, scale, floor, high, low, BLOCK: tl.constexpr, LISTED: tl.constexpr, IDS: tl.constexpr
):
    """Find the token with the highest score among the logits at or above `floor`; of equal ones the lowest."""
    best, chosen = tl.full((), _LOWEST, tl.float32), tl.full((), _NONE, tl.int32)
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = read(source, at, length, scale, LISTED)
        token = at
        if LISTED:
            token = tl.load(names + at, mask=at < length, other=_NONE)
        inside = (at < length) & (value >= floor)
        score = tl.where(inside, value + gumbel(named(ids, token, inside, IDS), high, low), _LOWEST)
        top = tl.max(score, axis=0)
        first = tl.min(tl.where(inside & (score == top), token, _NONE), axis=0)
        better = (top > best) | ((top == best) & (first < chosen))
        best, chosen = tl.where(better, top, best), tl.where(better, first, chosen)
    return chosen


@triton.jit
def named(ids, column, known, IDS: tl.constexpr):
    """Return the target's token of a column."""
    if IDS:
        column = tl.load(ids + column, mask=known, other=0)
    return column
