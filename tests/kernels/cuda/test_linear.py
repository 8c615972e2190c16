from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from paceline.kernels.cuda import linear
from paceline.kernels.cuda.compiling import compiling, only_compiling
from paceline.kernels.cuda.expand import expanded
from paceline.kernels.cuda.formats import CHANNEL, FLOAT, FLOAT8, GROUPED, NIBBLES, CudaMatrix, pack
from paceline.kernels.cuda.linear import ALONE_ROWS, GELU, SILU, Products
from paceline.kernels.cuda.many import BLOCKS, Block, finish
from paceline.kernels.cuda.norm import finish_norm, norm
from paceline.kernels.cuda.tiles import MOST, PROCESSORS, UNIT, Tiles, parts_of, tiled_rows, whole_waves
from paceline.kernels.quant import FP8, Float8, dequantise, quantise, quantise_fp8
from tests.kernels.cuda.conftest import ON_GPU

SHAPES = [(64, 512), (96, 576), (200, 1024), (65, 320)]


def random(rows: int, columns: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1000 * rows + columns)
    return torch.randn((rows, columns), generator=generator).to(device=device, dtype=dtype)


def products(matrix: CudaMatrix, device: torch.device) -> Products:
    return Products([matrix], device=device, pdl=ON_GPU)


def close(out: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    error = (out.float() - wanted).norm() / wanted.norm()
    return bool(error < (1e-2 if dtype is torch.bfloat16 else 1e-5))


def in_bf16(values: Tensor) -> Tensor:
    """Round as the device does; Triton's interpreter cuts bits off."""
    return values.bfloat16() if ON_GPU else (values.view(torch.int32) & -65536).view(torch.float32).bfloat16()


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("rows", [1, 5, 17])
def test_product(outputs: int, inputs: int, parts: int, rows: int, device: torch.device, dtype: torch.dtype) -> None:
    x, w = random(rows, inputs, device, dtype), random(outputs, inputs, device, dtype, seed=1)
    bias = random(1, outputs, device, dtype, seed=2)[0].float()
    matrix = pack([w], parts=parts, biases=[bias], dtype=dtype, device=device)
    out = torch.full((rows, outputs), torch.nan, device=device, dtype=dtype)
    product = products(matrix, device)
    product(x, matrix, out)
    assert close(out, x.float() @ w.float().T + bias, dtype)
    assert not product.counters.any()


@pytest.mark.parametrize(("each", "activation"), [(40, 0), (48, SILU)])
@pytest.mark.parametrize("outputs", [80, 96])
@pytest.mark.parametrize("format", ["floats", "fp8"])
def test_tiles_of_any_number_of_outputs(
    each: int, activation: int, outputs: int, format: str, device: torch.device, dtype: torch.dtype
) -> None:
    """They compute the bits of full ones, and write nothing else, also if the last one has fewer outputs."""
    x, w = random(3, 512, device, dtype), random(outputs, 512, device, dtype, seed=1)
    matrix = pack([quantise_fp8(w.float()) if format == "fp8" else w], parts=1, dtype=dtype, device=device)
    full, some = (torch.full((4, outputs // (2 if activation else 1)), torch.nan, device=device) for _ in range(2))
    for out, count in ((full, 64), (some, each)):
        tiles = Tiles(rows=16, inputs=128, stages=2, outputs=count)
        products(matrix, device).by_tiles(x, matrix, out[:3], activation=activation, tiles=tiles)
    assert torch.equal(some[:3], full[:3])
    assert not full[:3].isnan().any()
    assert some[3].isnan().all()


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_residual(outputs: int, inputs: int, device: torch.device, dtype: torch.dtype) -> None:
    x, w = random(3, inputs, device, dtype), random(outputs, inputs, device, dtype, seed=1)
    matrix = pack([w], parts=2, dtype=dtype, device=device)
    out = random(3, outputs, device, dtype, seed=2)
    wanted = x.float() @ w.float().T + out.float()
    products(matrix, device)(x, matrix, out, residual=out)
    assert close(out, wanted, dtype)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_product_is_rounded_before_the_residual_is_added(parts: int, device: torch.device) -> None:
    """Small whole numbers have exact sums, so that only the two roundings to bf16 are seen."""
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    x, w = (random(n, 2 * UNIT, device, torch.float32, seed=n).mul(4).round().to(dtype) for n in (3, 40))
    residual = random(3, 40, device, torch.bfloat16, seed=1)
    exact = x.float() @ w.float().T
    wanted = in_bf16(in_bf16(exact).float() + residual.float())
    assert not torch.equal(wanted, in_bf16(exact + residual.float())), "these numbers show nothing"
    matrix = pack([w], parts=parts, dtype=dtype, device=device)
    out, finished = torch.full_like(residual, torch.nan), torch.full_like(residual, torch.nan)
    products(matrix, device)(x, matrix, out, residual=residual)
    finish(exact[None], None, residual, finished)
    assert torch.equal(out, wanted)
    assert torch.equal(finished, wanted)


@pytest.mark.parametrize("activation", [SILU, GELU])
@pytest.mark.parametrize("rows", [2, 20])
@pytest.mark.parametrize("format", ["floats", "int8", "int4", "fp8"])
def test_gate(activation: int, rows: int, format: str, device: torch.device, dtype: torch.dtype) -> None:
    x = random(rows, 320, device, dtype)
    pair = [random(96, 320, device, dtype, seed=seed) / 16 for seed in (1, 2)]
    bias = [random(1, 96, device, torch.float32, seed=seed)[0] for seed in (3, 4)]
    make = {
        "floats": lambda w: w,
        "int8": lambda w: quantise(w.float(), bits=8),
        "int4": lambda w: quantise(w.float(), bits=4, group=32),
        "fp8": quantise_fp8,
    }[format]
    made = [make(w) for w in pair]
    matrix = pack(made, parts=1, gated=True, biases=bias, dtype=dtype, device=device)
    out = torch.full((rows, 96), torch.nan, device=device, dtype=dtype)
    products(matrix, device)(x, matrix, out, activation=activation)
    gate, up = ((q if isinstance(q, Tensor) else dequantise(q)).float().to(device) for q in made)
    g, u = x.float() @ gate.T + bias[0], x.float() @ up.T + bias[1]
    wanted = (functional.silu(g) if activation == SILU else functional.gelu(g, approximate="tanh")) * u
    assert close(out, wanted, dtype)


@pytest.mark.parametrize("format", ["int8", "int8 groups", "int4", "fp8", "mixed"])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("rows", [1, 18])
def test_formats(format: str, parts: int, rows: int, device: torch.device, dtype: torch.dtype) -> None:
    x = random(rows, 576, device, dtype)
    a, b = (random(n, 576, torch.device("cpu"), torch.float32, seed=n) for n in (70, 33))
    make = {
        "int8": (lambda w: quantise(w, bits=8), CHANNEL),
        "int8 groups": (lambda w: quantise(w, bits=8, group=32), GROUPED),
        "int4": (lambda w: quantise(w, bits=4, group=32), NIBBLES),
        "fp8": (quantise_fp8, FLOAT8),
        "mixed": (lambda w: quantise(w, bits=4, group=32) if len(w) == 70 else w, FLOAT),
    }
    quantised = [make[format][0](w) for w in (a, b)]
    matrix = pack(quantised, parts=parts, dtype=dtype, device=device)
    assert matrix.format == make[format][1]
    out = torch.full((rows, 103), torch.nan, device=device, dtype=dtype)
    products(matrix, device)(x, matrix, out)
    whole = torch.cat([q if isinstance(q, Tensor) else dequantise(q) for q in quantised]).to(device)
    assert close(out, x.float() @ whole.T, dtype)


@pytest.mark.parametrize("parts", [1, 2])
def test_bits_of_a_row_depend_on_nothing_else(parts: int, device: torch.device, dtype: torch.dtype) -> None:
    rows = (1, 16, 33, 64, 65, 200) if ON_GPU else (1, 17, 70)
    x, w = random(max(rows), 2 * UNIT, device, dtype), random(128, 2 * UNIT, device, dtype, seed=1)
    matrix = pack([w], parts=parts, dtype=dtype, device=device)
    product, first = products(matrix, device), None
    for count in rows:
        out = torch.full((count, 128), torch.nan, device=device, dtype=torch.float32)
        product(x[:count], matrix, out)
        first = out[0].clone() if first is None else first
        assert torch.equal(out[0], first)
        assert close(out, x[:count].float() @ w.float().T, dtype)


@pytest.mark.parametrize("format", ["int4", "int8 groups", "fp8"])
@pytest.mark.parametrize("parts", [1, 2])
def test_expanded_matrices_give_the_same_bits(
    format: str, parts: int, device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An odd number of outputs, and of groups if there is one part."""
    inputs, counts = (2 * UNIT if parts == 2 else 96, (8, 40)) if not ON_GPU else (2 * UNIT, (64, 300))
    monkeypatch.setattr(linear, "EXPANDED_ROWS", counts[1])
    w, x = random(70, inputs, device, dtype), random(counts[1], inputs, device, dtype, seed=1)
    bits = 4 if format == "int4" else 8
    weight = quantise_fp8(w.float()) if format == "fp8" else quantise(w.float(), bits=bits, group=32)
    matrix = pack([weight], parts=parts, dtype=dtype, device=device)
    product, few, many = products(matrix, device), *(torch.empty(n, 70, device=device, dtype=dtype) for n in counts)
    product(x[: counts[0]], matrix, few)
    product(x, matrix, many)
    assert torch.equal(many[: counts[0]], few)
    assert close(many, x.float() @ dequantise(weight).to(device).T, dtype)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("activation", [0, SILU])
def test_what_follows_the_sums(parts: int, activation: int, device: torch.device, dtype: torch.dtype) -> None:
    if activation and parts > 1:
        pytest.skip(reason="a gated matrix is never divided")
    sums = torch.stack([random(3, 130, device, dtype, seed=part) for part in range(parts)]).float()
    bias = random(1, 130, device, dtype, seed=7)[0].float()
    width = 65 if activation else 130
    residual = random(3, width, device, dtype, seed=8)
    out = torch.full((3, width), torch.nan, device=device, dtype=dtype)
    finish(sums, bias, residual, out, activation=activation, pdl=ON_GPU)
    total = sums.sum(0) + bias
    if activation:
        total = functional.silu(total[:, ::2].to(dtype).float()) * total[:, 1::2].to(dtype).float()
    assert close(out, total + residual.float(), dtype)


@pytest.mark.unwatched
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("operation", ["plain", "bias", "residual", "gate", "parts"])
def test_blocks_give_the_bits_of_tiles(block: Block, operation: str, device: torch.device, dtype: torch.dtype) -> None:
    if ON_GPU and dtype == torch.float32:
        pytest.skip("shared memory has no room for blocks of 32 bits, which nothing asks for")
    rows, outputs, inputs = (700, 1040, 520) if ON_GPU else (70, 272, 264)
    x, w = random(rows, inputs, device, dtype), random(outputs, inputs, device, dtype, seed=1)
    biases = [random(1, outputs, device, torch.float32, seed=2)[0]] if operation == "bias" else []
    matrix = pack([w], parts=2 if operation == "parts" else 1, biases=biases, dtype=dtype, device=device)
    product, activation = products(matrix, device), SILU if operation == "gate" else 0
    width = outputs // 2 if activation else outputs
    residual = random(rows, width, device, dtype, seed=3) if operation in ("residual", "parts") else None
    mine, other = (torch.full((rows, width), torch.nan, device=device, dtype=dtype) for _ in range(2))
    product.by_tiles(x, matrix, mine, residual=residual, activation=activation)
    product.by_blocks(x, matrix, other, block=block, residual=residual, activation=activation)
    assert torch.equal(mine, other)


@pytest.mark.parametrize("format", ["floats", "int4", "int8", "fp8"])
@pytest.mark.parametrize("rows", [16, 18])
def test_the_norm_finishes_parts(format: str, rows: int, device: torch.device, dtype: torch.dtype) -> None:
    """Parts that are left to the norm give the bits of a product that adds them itself."""
    x, w = random(rows, 2 * UNIT, device, dtype), random(128, 2 * UNIT, device, dtype, seed=1)
    make = {
        "floats": lambda w: w,
        "int4": lambda w: quantise(w, bits=4, group=32),
        "int8": lambda w: quantise(w, bits=8),
        "fp8": quantise_fp8,
    }
    matrix = pack([make[format](w.float().cpu())], parts=2, dtype=dtype, device=device)
    product, weight = products(matrix, device), random(1, 128, device, torch.float32, seed=2)[0]
    mine, other = (random(rows, 128, device, dtype, seed=3) for _ in range(2))
    normed, left = torch.empty_like(mine), torch.empty_like(mine)
    product(x, matrix, mine, residual=mine)
    norm(mine, weight, normed, eps=1e-5)
    sums = product.sums(x, matrix, other)
    assert (sums is None) == (format == "int8" or rows <= ALONE_ROWS)  # sums of int8 are scaled once they are whole
    if sums is not None:
        finish_norm(sums, None, other, weight, left, eps=1e-5)
        assert torch.equal(mine, other)
        assert torch.equal(normed, left)


@pytest.mark.skipif(not ON_GPU, reason="there is no library to compare with")
@pytest.mark.parametrize("rows", [80, 160, 320, 512])
@pytest.mark.parametrize(("outputs", "inputs", "parts"), [(6144, 4096, 1), (4096, 4096, 2), (2048, 8192, 4)])
def test_the_library_gives_the_same_bits(rows: int, outputs: int, inputs: int, parts: int) -> None:
    device, dtype = torch.device("cuda"), torch.bfloat16
    x, w = random(rows, inputs, device, dtype), random(outputs, inputs, device, dtype, seed=1)
    matrix = pack([w], parts=parts, dtype=dtype, device=device)
    product = products(matrix, device)
    mine, other = (torch.full((rows, outputs), torch.nan, device=device, dtype=dtype) for _ in range(2))
    product.by_tiles(x, matrix, mine)
    product.by_library(x, matrix, other)
    assert torch.equal(mine, other)
    assert product._way(x, matrix, mine, False, 0) != product.by_tiles


@pytest.mark.skipif(not ON_GPU, reason="there is no library to compare with")
@pytest.mark.parametrize("rows", [20, 64, 80, 128, 320, 2048])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (4096, 14336)])
def test_the_library_adds_the_residual(rows: int, outputs: int, inputs: int) -> None:
    """A library that may not divide K gives the bits of tiles at every number of rows, the residual included."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    x, w = random(rows, inputs, device, dtype), random(outputs, inputs, device, dtype, seed=1)
    matrix = pack([w], parts=1, dtype=dtype, device=device)
    product, residual = products(matrix, device), random(rows, outputs, device, dtype, seed=2)
    mine, other = residual.clone(), residual.clone()
    product.by_tiles(x, matrix, mine, residual=mine)
    product.by_whole_library(x, matrix, other, residual=other)
    assert torch.equal(mine, other)
    assert product._way(x, matrix, mine, True, 0) != product.by_tiles


@pytest.mark.skipif(not ON_GPU, reason="there is no library to compare with")
@pytest.mark.parametrize("rows", [272, 320])
def test_the_library_gives_the_same_bits_in_two_calls(rows: int) -> None:
    device, dtype, outputs, inputs = torch.device("cuda"), torch.bfloat16, 28672, 4096
    assert whole_waves(outputs, rows)
    x, w = random(rows, inputs, device, dtype), random(outputs, inputs, device, dtype, seed=1)
    matrix = pack([w], parts=1, dtype=dtype, device=device)
    product = products(matrix, device)
    mine, other = (torch.full((rows, outputs // 2), torch.nan, device=device, dtype=dtype) for _ in range(2))
    product.by_tiles(x, matrix, mine, activation=SILU)
    product.by_library(x, matrix, other, activation=SILU)
    assert torch.equal(mine, other)


def test_the_library_computes_the_last_outputs_apart(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, dtype: torch.dtype
) -> None:
    x, w = random(8, 256, device, dtype), random(96, 256, device, dtype, seed=1)
    matrix, calls = pack([w], parts=1, dtype=dtype, device=device), []
    outs = {0: torch.empty((8, 96), device=device, dtype=dtype), SILU: torch.empty((8, 48), device=device, dtype=dtype)}

    def multiply(left: Tensor, right: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> None:
        calls.append(right.shape[1])
        out.copy_((left.double() @ right.double()).to(out_dtype))

    monkeypatch.setattr(torch, "mm", multiply)
    for activation, out in outs.items():
        results = []
        for whole in (0, 64):
            monkeypatch.setattr(linear, "whole_waves", lambda outputs, rows, whole=whole: whole)
            products(matrix, device).by_library(x, matrix, out.fill_(torch.nan), activation=activation)
            results.append(out.clone())
        assert torch.equal(*results)
    assert calls == [96, 64, 32] * 2


@pytest.mark.parametrize(
    ("outputs", "rows", "whole"),
    [
        (28672, 320, 25344),  # 3.4 waves of tiles
        (51200, 320, 50688),  # 6.1
        (128256, 320, 126720),  # 15.2
        (16384, 320, 0),  # 1.9: most multiprocessors have work to the end
        (6144, 320, 0),  # less than one
        (25344, 320, 0),  # exactly three
        (28672, 256, 0),  # other tiles: not measured
        (28672, 321, 0),
    ],
)
def test_outputs_of_whole_waves(outputs: int, rows: int, whole: int) -> None:
    assert whole_waves(outputs, rows) == whole


@pytest.mark.skipif(not ON_GPU, reason="there is no library to compare with")
def test_ways_are_tried_once_while_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """And once more afterwards, because nothing was computed then."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    x, w = random(320, 1024, device, dtype), random(4096, 1024, device, dtype, seed=1)
    matrix = pack([w], parts=1, dtype=dtype, device=device)
    product, out, tries = products(matrix, device), torch.empty((320, 4096), device=device, dtype=dtype), []
    tried = product._tried
    monkeypatch.setattr(product, "_tried", lambda *given: tries.append(only_compiling()) or tried(*given))
    with compiling():
        for _ in range(3):
            product(x, matrix, out)
    for _ in range(3):
        product(x, matrix, out)
    assert tries == [True, False]


@pytest.mark.parametrize(("rows", "activation", "first"), [(128, SILU, False), (129, SILU, True), (128, 0, True)])
def test_blocks_come_first_for_few_gated_rows(rows: int, activation: int, first: bool, device: torch.device) -> None:
    """There the library needs another launch for the gate. The first way with the right bits is taken."""
    x, w = torch.empty((rows, 64), dtype=torch.bfloat16, device=device), torch.empty((256, 64), device=device)
    product = products(pack([w], parts=1, dtype=torch.bfloat16, device=device), device)
    ways = product._candidates(x, torch.empty((rows, 128), dtype=torch.bfloat16, device=device), activation)
    assert (ways[0] == product.by_library) == first
    assert product.by_library in ways


@pytest.mark.parametrize(("rows", "blocks"), [(1023, len(BLOCKS)), (1024, 1), (8192, 1)])
def test_of_many_rows_only_the_largest_block_is_tried(rows: int, blocks: int, device: torch.device) -> None:
    """A comparison by themselves would take a smaller one now and then, which slows a pass down by up to 10 %."""
    x, w = torch.empty((rows, 64), dtype=torch.bfloat16, device=device), torch.empty((256, 64), device=device)
    product = products(pack([w], parts=1, dtype=torch.bfloat16, device=device), device)
    ways = product._candidates(x, torch.empty((rows, 128), dtype=torch.bfloat16, device=device), SILU)
    own = [way.keywords["block"] for way in ways if isinstance(way, partial)]
    assert own == [*BLOCKS[-blocks:]]


def test_every_byte_of_a_float_is_exact(device: torch.device, dtype: torch.dtype) -> None:
    """Subnormal numbers included; a row of ones and zeros selects the inputs one by one."""
    bytes = torch.arange(256, dtype=torch.uint8).where(torch.arange(256) % 128 != 127, 0).to(device)  # without NaN
    weight = Float8(torch.stack([bytes.roll(i) for i in range(64)]).view(FP8), torch.full((64, 1), 0.25, device=device))
    matrix = pack([weight], parts=1, dtype=dtype, device=device)
    out = torch.full((256, 64), torch.nan, device=device, dtype=torch.float32)
    products(matrix, device).by_tiles(torch.eye(256, device=device, dtype=dtype), matrix, out)
    assert torch.equal(out.T, dequantise(weight))


@pytest.mark.parametrize(("rows", "format"), [(64, FLOAT8), (65, FLOAT)])
def test_many_rows_take_the_floats_beside_8_bit_ones(rows: int, format: int, device: torch.device) -> None:
    matrix = expanded(
        pack([quantise_fp8(torch.randn(32, 128))], parts=1, dtype=torch.bfloat16, device=device), dtype=torch.bfloat16
    )
    x = torch.zeros((rows, 128), dtype=torch.bfloat16, device=device)
    assert products(matrix, device)._ready(matrix, x).format == format
    assert matrix.bytes == 32 * 128 + 4 * 32 + 2 * 32 * 128, "both count as memory"


def test_few_rows_have_small_tiles() -> None:
    few, more = (Tiles.of(rows, outputs=4096, parts=2, gated=False, format=FLOAT, size=2) for rows in (1, 40))
    assert few.rows == 16
    assert more.rows == 64


@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize(("outputs", "inputs", "each"), [(4096, 14336, 32), (5120, 25600, 40), (1024, 4096, 32)])
def test_tiles_of_fewer_outputs_fill_the_device(rows: int, outputs: int, inputs: int, each: int) -> None:
    """A second program on some multiprocessors would take as long as the first on all of them."""
    parts = parts_of(outputs, inputs, gated=False)
    tiles = Tiles.of(rows, outputs=outputs, parts=parts, gated=False, format=FLOAT, size=2)
    programs = parts * -(-outputs // tiles.outputs) * -(-rows // tiles.rows)
    assert tiles.outputs == (each if rows <= 16 else 64)
    assert MOST * PROCESSORS < programs <= (PROCESSORS if rows <= 16 else 2 * PROCESSORS)


@pytest.mark.parametrize(
    ("outputs", "gated", "each"),
    [
        (6144, False, 48),
        (10240, False, 64),
        (51200, True, 100),
        (28672, True, 112),
        (34816, True, 128),
        (512, True, 128),
    ],
)
def test_few_rows_fill_the_device_in_whole_turns(outputs: int, gated: bool, each: int) -> None:
    """Gated tiles run two at once on a multiprocessor, but for those that would be too empty."""
    tiles = Tiles.of(16, outputs=outputs, parts=1, gated=gated, format=FLOAT, size=2)
    assert tiles.outputs == each
    assert Tiles.of(17, outputs=outputs, parts=1, gated=gated, format=FLOAT, size=2).outputs == (128 if gated else 64)


def test_products_of_fewer_outputs_go_to_the_library_earlier() -> None:
    assert tiled_rows(4096, 1, gated=False) < tiled_rows(4096, 2, gated=False) == tiled_rows(6144, 1, gated=False)


@pytest.mark.parametrize(
    ("outputs", "inputs", "parts"),
    [
        (6144, 4096, 1),
        (4096, 14336, 1),
        (5120, 25600, 1),
        (10240, 5120, 1),
        (2048, 8192, 4),
        (2048, 6144, 4),
        (3072, 8192, 2),
        (576, 1536, 3),
        (96, 576, 1),
    ],
)
def test_narrow_matrices_are_divided(outputs: int, inputs: int, parts: int) -> None:
    assert parts_of(outputs, inputs, gated=False) == parts
    assert parts_of(outputs, inputs, gated=True) == 1
    assert parts_of(outputs, inputs, gated=False, floats=False) == (2 if outputs in (4096, 5120) else parts)


@pytest.mark.skipif(not ON_GPU, reason="only beside a library there is a choice")
def test_tries_leave_no_memory_behind(device: torch.device) -> None:
    """A descriptor keeps its tensor alive, and the tensors of a try are as large as those of a prompt."""
    matrix = pack([random(4096, 1024, device, torch.bfloat16)], parts=1, biases=[], dtype=torch.bfloat16, device=device)
    product = products(matrix, device)
    held = []
    for rows in (1024, 1536, 2048):
        x, out = (torch.zeros((rows, width), dtype=torch.bfloat16, device=device) for width in (1024, 4096))
        product(x, matrix, out)
        del x, out
        held.append(torch.cuda.memory_allocated(device))
    assert held[2] - held[0] < 2 * 2048 * (1024 + 4096) * 2, "one descriptor each for the caller's own tensors, at most"
