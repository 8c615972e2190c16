"""Rotate the queries and keys of a layer's packed projection, and store keys and values, in one launch.

    qkv [rows, heads + 2 * kv_heads, head_dim]
         ├ query heads   (norm) → rotate → queries [rows, heads, head_dim]
         ├ key heads     (norm) → rotate → keys of the layer at slots[row]
         └ value heads   ──────────────→ values of the layer at slots[row]

A program computes one row of HEADS_EACH adjacent heads of any kind, so that a row never depends on others. It computes
in float32 and rounds where `kernels.reference` rounds: after the norm and after the rotation.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.base import PAGE_SIZE
from paceline.kernels.cuda.kv import CudaKV
from paceline.kernels.quant import FP8, FP8_MAX

HEADS_EACH = 8  # heads per program; with head_dim 128 every thread of two warps moves 16 bytes of each half


def rotate(
    qkv: Tensor,
    queries: Tensor,
    kv: CudaKV,
    layer: int,
    *,
    positions: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    pdl: bool = False,
) -> None:
    """Fill queries [rows, heads, head_dim] and the slots [rows] of the layer from qkv [rows, packed heads].

    cos and sin are float32 [positions, head_dim / 2]; q_norm and k_norm float32 [head_dim], both or neither.
    """
    rows, heads, head_dim = queries.shape
    keys, values = kv.keys[layer], kv.values[layer]
    kv_heads = keys.shape[1]
    packed = heads + 2 * kv_heads
    assert qkv.numel() == rows * packed * head_dim, f"{rows} rows of {packed} heads, but qkv is {tuple(qkv.shape)}"
    assert all(x.is_contiguous() for x in (qkv, queries, positions, slots, cos, sin))
    assert (q_norm is None) == (k_norm is None), "queries and keys are normed together"
    half = triton.next_power_of_2(head_dim // 2)
    each = min(HEADS_EACH, triton.next_power_of_2(packed))
    _rotate[(rows, triton.cdiv(packed, each))](
        qkv,
        queries,
        keys,
        values,
        positions,
        slots,
        cos,
        sin,
        qkv if q_norm is None else q_norm,  # a placeholder is never read
        qkv if k_norm is None else k_norm,
        eps,
        cos.shape[0],
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        EACH=each,
        PAGE=PAGE_SIZE,
        NORM=q_norm is not None,
        LIMIT=FP8_MAX if keys.dtype == FP8 else 0.0,
        PDL=pdl,
        num_warps=max(1, min(4, each * half // 256)),
        launch_pdl=pdl,
    )


@triton.jit
def _rotate(
    qkv,
    queries,
    keys,
    values,
    positions,
    slots,
    cos,
    sin,
    q_norm,
    k_norm,
    eps,
    table,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    EACH: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * EACH + tl.arange(0, EACH)  # index among the packed heads
    d = tl.arange(0, HALF)[None, :] + (head * 0)[:, None]  # full shape, so that all loads have one layout
    inside = d < HEAD_DIM // 2
    mask = (head < HEADS + 2 * KV_HEADS)[:, None] & inside
    is_query = head < HEADS
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_value = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    if NORM:  # constant weights, loaded before the wait
        kind = is_key[:, None]
        weight1 = tl.where(kind, _half(k_norm, d, inside), _half(q_norm, d, inside))
        weight2 = tl.where(kind, _half(k_norm + HEAD_DIM // 2, d, inside), _half(q_norm + HEAD_DIM // 2, d, inside))
    if PDL:
        tl.extra.cuda.gdc_wait()
    position = tl.load(positions + row)
    slot = tl.load(slots + row).to(tl.int64)
    source = qkv + row * ((HEADS + 2 * KV_HEADS) * HEAD_DIM) + head[:, None] * HEAD_DIM + d
    packed1 = tl.load(source, mask=mask, other=0.0)  # [EACH, HALF], the first half of each head
    packed2 = tl.load(source + HEAD_DIM // 2, mask=mask, other=0.0)
    known = inside & (position >= 0) & (position < table)
    angle = position.to(tl.int64) * (HEAD_DIM // 2) + d
    c = tl.load(cos + angle, mask=known, other=1.0)
    s = tl.load(sin + angle, mask=known, other=0.0)

    x1, x2 = packed1.to(tl.float32), packed2.to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 1) / HEAD_DIM + eps)[:, None]
        x1 = (x1 * inverse * weight1).to(packed1.dtype).to(tl.float32)
        x2 = (x2 * inverse * weight2).to(packed1.dtype).to(tl.float32)
    turned1 = turn(x1, x2, c, -s).to(packed1.dtype)
    turned2 = turn(x2, x1, c, s).to(packed1.dtype)

    target = queries + row * (HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + d
    tl.store(target, turned1, mask=is_query[:, None] & inside)
    tl.store(target + HEAD_DIM // 2, turned2, mask=is_query[:, None] & inside)
    place = (slot // PAGE) * (KV_HEADS * PAGE * HEAD_DIM) + (slot % PAGE) * HEAD_DIM  # offset of head 0 in the page
    target = keys + place + (head - HEADS)[:, None] * (PAGE * HEAD_DIM) + d
    mask = is_key[:, None] & inside & (slot >= 0)
    tl.store(target, narrowed(turned1, keys, LIMIT), mask=mask)
    tl.store(target + HEAD_DIM // 2, narrowed(turned2, keys, LIMIT), mask=mask)
    target = values + place + (head - HEADS - KV_HEADS)[:, None] * (PAGE * HEAD_DIM) + d
    mask = is_value[:, None] & inside & (slot >= 0)
    tl.store(target, narrowed(packed1, values, LIMIT), mask=mask)
    tl.store(target + HEAD_DIM // 2, narrowed(packed2, values, LIMIT), mask=mask)


@triton.jit
def _half(weight, d, inside):
    return tl.load(weight + d, mask=inside, other=0.0)


@triton.jit
def turn(x, partner, c, s):
    """Compute one coordinate of a rotated pair. `fma` fixes the rounding, because attention rotates, too."""
    return tl.fma(x, c, partner * s)


@triton.jit
def whole(source, mask, size, dtype: tl.constexpr, PARTS: tl.constexpr):
    """Load numbers of a product; of one in PARTS, `size` numbers each, add the parts in order and round to `dtype`."""
    if PARTS == 1:
        return tl.load(source, mask=mask, other=0.0)
    total = tl.zeros(mask.shape, tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(source + part * size, mask=mask, other=0.0)
    return total.to(dtype)


@triton.jit
def narrowed(x, memory, LIMIT: tl.constexpr):
    """Convert x to the type of `memory`; with LIMIT > 0 it saturates at ±LIMIT."""
    if LIMIT > 0:
        x = tl.minimum(tl.maximum(x.to(tl.float32), -LIMIT), LIMIT)
    return x.to(memory.dtype.element_ty)


@triton.jit
def turned(
    source, place, valid, cos, sin, angles, size, dtype: tl.constexpr,
    HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip  # a name a line would hide the shape
    """Load heads [BLOCK_M, PADDED] as `whole` does and rotate them by their positions `place`, as `rotate` does."""
    HALF: tl.constexpr = HEAD_DIM // 2
    d = tl.arange(0, PADDED)
    mask = valid[:, None] & (d < HEAD_DIM)[None, :]
    x = whole(source + d[None, :], mask, size, dtype, PARTS)
    partner = whole(source + tl.where(d < HALF, d + HALF, d - HALF)[None, :], mask, size, dtype, PARTS)
    known = mask & ((place >= 0) & (place < angles))[:, None]
    angle = place.to(tl.int64)[:, None] * HALF + tl.where(d < HALF, d, d - HALF)[None, :]
    c = tl.load(cos + angle, mask=known, other=1.0)
    s = tl.load(sin + angle, mask=known, other=0.0)
    s = tl.where((d < HALF)[None, :], -s, s)
    return turn(x.to(tl.float32), partner.to(tl.float32), c, s).to(x.dtype)
