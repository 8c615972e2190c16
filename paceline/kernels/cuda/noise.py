"""The noise of kernels/noise.py and the keys of sampling/sampler.py inside kernels; all but `rough_gumbel` to the bit.

Kernels that use it are launched without fused multiply-adds: each operation must round as on every other machine.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from paceline.kernels import noise
from paceline.sampling.sampler import Stream

ROUGHLY = 1e-3  # upper bound of twice the error of `rough_gumbel`

LN2_HIGH, LN2_LOW = tl.constexpr(noise.LN2_HIGH), tl.constexpr(noise.LN2_LOW)
_LN2 = tl.constexpr(0.6931472)
_SQRT_HALF, _MANTISSA = tl.constexpr(noise.SQRT_HALF), tl.constexpr(noise.MANTISSA)
_P0, _P1, _P2, _P3, _P4, _P5, _P6, _P7, _P8 = (tl.constexpr(value) for value in noise.POLYNOMIAL)
_TOKEN, _DRAFT = tl.constexpr(int(Stream.TOKEN)), tl.constexpr(int(Stream.DRAFT))


@triton.jit
def keys_of(seed, lane, position, stream: tl.constexpr):
    """Compute `sampler.noise_keys`: two 32-bit numbers."""
    bits = mix(tl.load(seed + lane), position, stream)
    return (bits >> 32).to(tl.uint32), bits.to(tl.uint32)


@triton.jit
def mix(seed, position, stream: tl.constexpr):
    """Compute `sampler.mix`: 64 bits for a seed (any 64 bits) and a position."""
    counter = position.to(tl.uint64) * 4 + stream
    return _finalise(seed.to(tl.uint64) ^ _finalise(counter * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03))


@triton.jit
def _finalise(bits):
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


@triton.jit
def gumbel(token, high, low):
    """Compute `noise.gumbel_noise` of tokens."""
    return -_log(-_log(_uniform(token, high, low)))


@triton.jit
def rough_gumbel(token, high, low, FAST: tl.constexpr):
    """Compute the noise of `gumbel` with an error below ROUGHLY / 2."""
    shifted = _random(token, high, low)
    uniform = shifted - 0.999999940395355224609375
    rest = 2.0 - shifted - 5.9604644775390625e-08  # 1 - uniform, exact; tiny if the noise is large
    series = rest * tl.fma(rest, tl.fma(rest, tl.fma(rest, tl.fma(rest, 0.2, 0.25), 0.33333334), 0.5), 1.0)
    inner = tl.where(rest < 0.25, series, -_LN2 * _log2(uniform, FAST))
    return -_LN2 * _log2(inner, FAST)


@triton.jit
def _log2(x, FAST: tl.constexpr):
    return libdevice.fast_log2f(x) if FAST else tl.log2(x)


@triton.jit
def _uniform(token, high, low):
    return _random(token, high, low) - 0.999999940395355224609375  # 1 - 2**-24: exact


@triton.jit
def _random(token, high, low):
    """Hash keys and token to a float32 number in [1, 2) with 23 random bits."""
    x = token.to(tl.uint32) * 0x9E3779B9 + high
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    x = (x ^ (x >> 16) ^ low) * 0x27D4EB2F
    x = x ^ (x >> 15)
    return ((x >> 9) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def _log(x):
    shifted = x.to(tl.int32, bitcast=True) - _SQRT_HALF
    exponent = (shifted >> 23).to(tl.float32)
    t = ((shifted & _MANTISSA) + _SQRT_HALF).to(tl.float32, bitcast=True) - 1.0
    square = t * t
    p = _P0 * t + _P1
    p = p * t + _P2
    p = p * t + _P3
    p = p * t + _P4
    p = p * t + _P5
    p = p * t + _P6
    p = p * t + _P7
    p = p * t + _P8
    p = p * t * square + exponent * LN2_LOW - square * 0.5
    return t + p + exponent * LN2_HIGH


@triton.jit
def draw_keys(seed, lengths, free, lane, row, position, FREE: tl.constexpr):
    """Return the keys of a row's noise: the target's, or those of a drafter in the round after `lengths`."""
    high, low = keys_of(seed, lane, position, _TOKEN)
    if FREE:
        place = (tl.load(lengths + lane).to(tl.int64) << 32) + position
        own_high, own_low = keys_of(seed, lane, place, _DRAFT)
        freely = tl.load(free + row) != 0
        high, low = tl.where(freely, own_high, high), tl.where(freely, own_low, low)
    return high, low
