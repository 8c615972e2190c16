"""The kernel of a product by tiles, for weights of every format. `linear` orders its sums, and launches it."""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.cuda.many import added, gated


@triton.jit
def _add_groups(acc, x, w, scale, r, n, first, last, outputs, inputs, x_stride, known_r, known_n, FORMAT: tl.constexpr):
    """Add the product of the 64 inputs from `first` on, which are two groups of a grouped format.

    A byte of NIBBLES has an input of the first group in its low half, and one of the second in its high half."""
    i = tl.arange(0, 32)
    if FORMAT == 3:  # NIBBLES
        at = w + n[:, None] * (inputs // 2) + first // 2 + i[None, :]
        packed = tl.load(at, mask=known_n[:, None] & (first < last), other=0)
    for group in tl.static_range(2):
        k = first + 32 * group + i
        inside = k < last
        if FORMAT == 3:  # NIBBLES
            q = (packed >> 4) if group else (packed & 15)
        else:
            q = tl.load(w + n[:, None] * inputs + k[None, :], mask=known_n[:, None] & inside[None, :], other=0)
        at = 2 * ((first // 32 + group) * outputs + n)
        known = known_n & (first + 32 * group < last)
        pair = tl.load(scale + at[:, None] + tl.arange(0, 2)[None, :], mask=known[:, None], other=0.0)
        step, low = tl.split(pair.to(tl.float32))
        xt = tl.load(x + r[:, None] * x_stride + k[None, :], mask=known_r[:, None] & inside[None, :], other=0.0)
        weights = (q.to(tl.float32) * step[:, None] + low[:, None]).to(xt.dtype)
        acc = tl.dot(weights, tl.trans(xt), acc, input_precision="ieee")
    return acc


@triton.jit
def _fetch(pointer, rows, first, inputs, known, AHEAD: tl.constexpr):
    """Prefetch AHEAD inputs of these rows of the weights [rows, inputs], 2 bytes each, into the second-level cache."""
    lines = tl.arange(0, AHEAD // 64)
    at = pointer + tl.where(known, rows, 0)[:, None] * inputs + first + lines[None, :] * 64
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _unpaired(pairs, dtype: tl.constexpr):
    """Convert pairs of e4m3 [outputs, inputs / 2] to `dtype` [outputs, inputs], for one product: of two products in a
    step the machine would compute one after the other, and wait for each."""
    outputs: tl.constexpr = pairs.shape[0]
    blocks: tl.constexpr = pairs.shape[1] // 64
    halves = tl.join(_eighths(pairs, False, dtype), _eighths(pairs, True, dtype))  # [outputs, inputs / 2, 2]
    apart = tl.permute(tl.reshape(halves, (outputs, blocks, 64, 2)), (0, 1, 3, 2))
    return tl.reshape(apart, (outputs, blocks * 128))


@triton.jit
def _eighths(pairs, HIGH: tl.constexpr, dtype: tl.constexpr):
    """Return the low or HIGH bytes of pairs, which are e4m3, as `dtype`, exactly.

    The machine's own conversions are slower than memory. Exponent and mantissa are in the places of bf16 once they are
    4 bits below the sign; a factor of 2^120, the difference of the biases of the exponents, is left."""
    if dtype == tl.bfloat16:
        parts: tl.constexpr = "mov.b32 s, $1; shr.u32 v, $1, 4;" if HIGH else "shl.b32 s, $1, 8; shl.b32 v, $1, 4;"
        value = tl.inline_asm_elementwise(
            "{ .reg .b32 s, v, f; "
            + parts
            + """ and.b32 v, v, 0x07f007f0;
            lop3.b32 v, s, 0x80008000, v, 0xea;
            mov.b32 f, 0x7b807b80;
            mul.bf16x2 $0, v, f; }""",
            "=r,r",
            [pairs],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        value = (pairs >> 8 if HIGH else pairs).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype)
    return value


@triton.jit(do_not_specialize=["rows"])
def tile_product(
    x,  # [rows, inputs]
    w,  # [outputs, inputs]
    out, residual, bias,
    scale,  # float32 [outputs], or [groups, outputs, 2] of a grouped format
    partial,  # float32 [parts, rows, outputs]
    counters,  # int32, all 0 between launches
    rows, outputs, inputs,
    share,  # inputs of a part
    x_stride,
    OUTPUTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    SPREAD: tl.constexpr, FINISHED: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr, BIAS: tl.constexpr, FORMAT: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip  # a name a line would hide the shape
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row_blocks = tl.cdiv(rows, BLOCK_R)
    program = tl.program_id(0)
    tile, block = program // row_blocks, program % row_blocks
    n = (tile * OUTPUTS + tl.arange(0, BLOCK_N)).to(tl.int64)
    r = (block * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    known_n = (n < outputs) & (tl.arange(0, BLOCK_N) < OUTPUTS)
    known_r = r < rows
    if AHEAD >= 64 and FORMAT == 0:
        _fetch(w, n, tl.program_id(1) * share, inputs, known_n, AHEAD)
    if AHEAD >= 128 and FORMAT == 4:  # pairs
        _fetch(w, n, tl.program_id(1) * share // 2, tl.cdiv(inputs, 128) * 64, known_n, AHEAD // 2)
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    for turn in range(1 if SPREAD else PARTS):
        first = (tl.program_id(1) if SPREAD else turn) * share
        last = tl.minimum(first + share, inputs)
        acc = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
        for k0 in tl.range(first, last, BLOCK_K, num_stages=STAGES):
            if FORMAT == 2 or FORMAT == 3:  # GROUPED, NIBBLES
                for step in tl.static_range(BLOCK_K // 64):
                    acc = _add_groups(
                        acc,
                        x,
                        w,
                        scale,
                        r,
                        n,
                        k0 + 64 * step,
                        last,
                        outputs,
                        inputs,
                        x_stride,
                        known_r,
                        known_n,
                        FORMAT,
                    )
            else:
                k = k0 + tl.arange(0, BLOCK_K)
                inside = known_r[:, None] if EVEN else known_r[:, None] & (k < last)[None, :]
                xt = tl.load(x + r[:, None] * x_stride + k[None, :], mask=inside, other=0.0)
                if FORMAT == 4:  # FLOAT8
                    at = k0 // 2 + tl.arange(0, BLOCK_K // 2)
                    place = n[:, None] * (tl.cdiv(inputs, 128) * 64) + at[None, :]
                    wanted = (at // 64 * 128 < last)[None, :]
                else:
                    place, wanted = n[:, None] * inputs + k[None, :], (k < last)[None, :]
                if EVEN and FULL:
                    wt = tl.load(w + place)
                else:
                    wt = tl.load(w + place, mask=known_n[:, None] if EVEN else known_n[:, None] & wanted, other=0)
                wt = _unpaired(wt, xt.dtype) if FORMAT == 4 else wt.to(xt.dtype)
                acc = tl.dot(wt, tl.trans(xt), acc, input_precision="ieee")
        total += acc
    if FORMAT == 4:  # FLOAT8, whose scales are powers of two
        total *= tl.load(scale + n, mask=known_n, other=0.0)[:, None]
    total = tl.trans(total)  # [rows, outputs]
    finishes = FINISHED
    if SPREAD:
        at = r[:, None] * outputs + n[None, :]
        known = known_r[:, None] & known_n[None, :]
        size = rows.to(tl.int64) * outputs
        tl.store(partial + tl.program_id(1) * size + at, total, mask=known)
        if FINISHED:
            tl.debug_barrier()
            finishes = tl.atomic_add(counters + program, 1, sem="acq_rel") == PARTS - 1
            if finishes:
                total = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
                for part in tl.static_range(PARTS):
                    total += tl.load(partial + part * size + at, mask=known, other=0.0, volatile=True)
                tl.store(counters + program, 0)
    if finishes:
        if FORMAT == 1:  # CHANNEL, whose sums are scaled once all parts are added
            total *= tl.load(scale + n, mask=known_n, other=0.0)[None, :]
        if BIAS:
            total += tl.load(bias + n, mask=known_n, other=0.0)[None, :]
        _end(total, out, residual, r, tile, rows, outputs, OUTPUTS, ACTIVATION, RESIDUAL)


@triton.jit
def _end(
    total, out, residual, r, tile, rows, outputs,
    OUTPUTS: tl.constexpr, ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip  # a name a line would hide the shape
    """Apply the gate or add the residual, and store a tile of the product."""
    EACH: tl.constexpr = OUTPUTS // 2 if ACTIVATION > 0 else OUTPUTS
    if ACTIVATION > 0:
        total = gated(total, out.dtype.element_ty, ACTIVATION)
        outputs = outputs // 2
    i = tl.arange(0, total.shape[1])
    n = tile.to(tl.int64) * EACH + i
    at = r[:, None] * outputs + n[None, :]
    known = (r < rows)[:, None] & ((i < EACH) & (n < outputs))[None, :]
    if RESIDUAL:
        total = added(total, tl.load(residual + at, mask=known, other=0.0), out.dtype.element_ty)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=known)
