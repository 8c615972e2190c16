"""The compiled forward against the same arithmetic in torch, for every CPU variant, format and architecture."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from paceline.errors import OutOfMemory, UnsupportedModel
from paceline.kernels.cpu import build
from paceline.kernels.quant import quantise
from paceline.runner.forwards.compiled import CompiledForward, kv_bytes_per_page
from tests.kernels.tiny_forward import (
    CONFIGS,
    FORMATS,
    PLAIN,
    RUNNABLE,
    Oracle,
    compiled,
    ints,
    random_weights,
    rows_of,
)

TOKENS = [(7 * i * i + 3 * i) % 90 for i in range(170)]
PAGES = [9, 3, 4, 0, 7, 1, 11, 5, 2, 6, 8]
# Every number of rows that has a kernel of its own, and two chunks of keys: 162 rows. No pass has the first row alone:
# it attends to one value, whose bf16 numbers may be halfway between two int8 numbers.
SIZES = (3, 2, 1, 5, 4, 6, 7, 8, 100, 9, 16, 1)


def compare(config, format, sizes=SIZES):
    forward = compiled(config, format, num_pages=12, threads=2)
    oracle = Oracle(config, random_weights(config, format), num_pages=12)
    start = 0
    for size in sizes:
        batch = rows_of((TOKENS, start, start + size, PAGES))
        got, wanted = forward(batch), oracle.logits(batch)
        # An input may be rounded up here and down there: rare, but with a second layer it reaches every later row.
        error = (got.logits - wanted).abs() / wanted.std()
        assert error.median() < (1e-5 if config.num_layers == 1 else 1e-2), f"{size} rows from {start}"
        assert error.max() < 0.1, f"{size} rows from {start}"
        assert torch.equal(got.argmax, got.logits.argmax(-1).int())
        start += size
    slots = rows_of((TOKENS, 0, start, PAGES)).slots
    for mine, other in zip(forward.kv.read(slots), oracle.kv.read(slots), strict=True):
        assert (mine - other).abs().max() < 0.05 * other.std()


@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize("format", [*FORMATS, "mixed"])
def test_every_variant_and_format(variant, format, monkeypatch):
    monkeypatch.setenv("PACELINE_CPU_VARIANT", variant)
    compare(CONFIGS["plain"], format)
    compare(CONFIGS["everything"], format)


def steepest_weights(config, format):
    """Inputs of ±127 and weights at both ends of their range, so that the sum of a group is as large as it can be."""
    bits, group = FORMATS[format]
    signs = torch.tensor([1.0, -1.0]).repeat(config.hidden_size)
    weights = random_weights(config, format)
    for name, weight in weights.items():
        if isinstance(weight, torch.Tensor):
            weights[name] = torch.ones_like(weight)
            continue
        outputs, inputs = weight.q.shape
        pattern = (torch.arange(outputs) % 4)[:, None]
        values = torch.where(pattern < 2, 1.0, signs[:inputs]) * torch.where(pattern % 2 == 0, 1.0, -1.0)
        values[:, ::32] = 0.0  # a group of 4 bits needs two values
        weights[name] = quantise(values.expand(outputs, inputs).contiguous(), bits=bits, group=group)
    kinds = torch.stack([torch.ones(config.hidden_size), signs[: config.hidden_size]])
    weights["embed"] = quantise(kinds.repeat(config.vocab_size // 2, 1), bits=8)
    return weights


@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize("format", FORMATS)
def test_the_largest_sums_of_a_group_are_exact(variant, format, monkeypatch):
    monkeypatch.setenv("PACELINE_CPU_VARIANT", variant)
    oracle = Oracle(PLAIN, steepest_weights(PLAIN, format), num_pages=4)
    forward = CompiledForward(PLAIN, steepest_weights(PLAIN, format), num_pages=4)
    batch = rows_of((TOKENS, 0, 13, [2]))
    got, wanted = forward(batch).logits, oracle.logits(batch)
    assert (got - wanted).abs().max() < 1e-3 * wanted.abs().max()


@pytest.mark.parametrize("config", CONFIGS)
def test_every_architecture(config):
    compare(CONFIGS[config], "int4", sizes=(130, 1, 8, 9))


def logits_of(variant, monkeypatch, rows=150):
    monkeypatch.setenv("PACELINE_CPU_VARIANT", variant)
    forward = compiled(CONFIGS["everything"], "mixed", num_pages=12)
    return forward(rows_of((TOKENS, 0, rows, PAGES))).logits


def test_variants_agree_bitwise(monkeypatch):
    logits = [logits_of(variant, monkeypatch) for variant in RUNNABLE]
    assert all(torch.equal(logits[0], other) for other in logits[1:])


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 150])
def test_avx_vnni_agrees_bitwise_in_the_encoding_of_avx512(monkeypatch, rows):
    """The same source with the same instructions, which CPUs with AVX-512 have in another encoding."""
    if "avxvnni" in RUNNABLE or not {"avx512", "avx2"} <= {*RUNNABLE}:
        pytest.skip(reason="runs as a variant of its own, or not at all")
    encoding = ["-mavx512vl", "-mavx512vnni"]
    flags = [flag for flag in build.VARIANTS["avxvnni"] if flag != "-mavxvnni"]
    monkeypatch.setitem(build.VARIANTS, "avxvnni", (*flags, *encoding))
    monkeypatch.setitem(build.NEEDS, "avxvnni", build.NEEDS["avx512"])
    assert torch.equal(logits_of("avxvnni", monkeypatch, rows), logits_of("avx2", monkeypatch, rows))


def test_float_matrices_run_as_8_bit_groups():
    config = PLAIN
    floats = {name: torch.randn(90, 64) * 0.2 for name in ("embed", "head")}
    forward = CompiledForward(config, random_weights(config) | floats, num_pages=4)
    rounded = {name: quantise(values, bits=8, group=32) for name, values in floats.items()}
    oracle = Oracle(config, random_weights(config) | rounded, num_pages=4)
    batch = rows_of((TOKENS, 0, 20, [2, 1]))
    assert (forward(batch).logits - oracle.logits(batch)).abs().median() < 1e-5


def test_weights_are_handed_over():
    weights = random_weights(PLAIN)
    CompiledForward(PLAIN, weights, num_pages=1)
    assert not weights


def test_only_wanted_rows_give_logits_and_ties_go_to_the_lowest_index():
    weights = random_weights(PLAIN)
    head = weights["head"]
    weights["head"] = replace(head, q=head.q[:1].repeat(90, 1), scale=head.scale[:1].repeat(90, 1))
    weights["head"] = replace(weights["head"], minimum=head.minimum[:1].repeat(90, 1))
    forward = CompiledForward(PLAIN, weights, num_pages=4)
    batch = replace(rows_of((TOKENS, 0, 20, [2, 1])), logit_rows=ints([3, 19]))
    out = forward(batch)
    assert out.logits.shape == (2, 90)
    assert out.argmax.tolist() == [0, 0]
    assert forward(replace(batch, logit_rows=ints([]))).logits.shape == (0, 90)


def test_nan_never_wins():
    weights = random_weights(PLAIN)
    weights["head.bias"] = torch.zeros(90)
    weights["head.bias"][:5] = float("nan")
    forward = CompiledForward(PLAIN, weights, num_pages=4)
    out = forward(rows_of((TOKENS, 0, 9, [2])))
    assert torch.equal(out.argmax, out.logits.nan_to_num(-1e9).argmax(-1).int())
    assert out.argmax.min() >= 5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": ints([90])}, "token"),
        ({"tokens": ints([-1])}, "token"),
        ({"positions": ints([64])}, "position"),
        ({"slots": ints([64])}, "slot"),
        ({"page_table": ints([4]).view(1, 1)}, "page"),
        ({"positions": ints([17])}, "page"),
        ({"row_starts": ints([0, 2])}, "rows"),
        ({"logit_rows": ints([1])}, "rows"),
    ],
)
def test_a_batch_that_points_nowhere_is_refused(changes, said):
    forward = compiled(PLAIN, num_pages=4)
    batch = rows_of((TOKENS, 0, 1, [2]))
    with pytest.raises(AssertionError, match=said):
        forward(replace(batch, **changes))
    assert forward(batch).logits.isfinite().all()


@pytest.mark.parametrize("variant", RUNNABLE)
def test_keys_and_values_are_rounded_to_the_nearest_and_finite(variant, monkeypatch):
    monkeypatch.setenv("PACELINE_CPU_VARIANT", variant)
    config = replace(PLAIN, qkv_bias=True)
    weights = random_weights(config)
    bias = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8 - 2**-20, 1e38, 3.4e38, torch.inf, -torch.inf])
    weights["layers.0.v"] = quantise(torch.zeros(64, 64), bits=8)
    weights["layers.0.v.bias"] = bias.repeat(8)
    forward = CompiledForward(config, weights, num_pages=4)
    forward(rows_of((TOKENS, 0, 3, [2])))
    _, values = forward.kv.read(rows_of((TOKENS, 0, 3, [2])).slots)
    most = torch.finfo(torch.bfloat16).max
    assert torch.equal(values, bias.bfloat16().float().clamp(-most, most).repeat(8).view(2, 32).expand(1, 3, 2, 32))


def test_moving_slots_reads_all_before_it_writes_any():
    forward = compiled(PLAIN, num_pages=4)
    forward(rows_of((TOKENS, 0, 20, [2, 1])))
    source, target = ints([33, 34, 16]), ints([34, 16, 33])
    before = forward.kv.read(source)
    forward.kv.move(source.tolist(), target.tolist())
    for one, other in zip(before, forward.kv.read(target), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 72}, "hidden size 72"),
        ({"intermediate_size": 100}, "intermediate size 100"),
        ({"head_dim": 24}, "head dimension 24"),
        ({"num_heads": 64, "num_kv_heads": 1}, "64 heads"),
    ],
)
def test_shapes_without_a_kernel_are_named(changes, said):
    with pytest.raises(UnsupportedModel, match=said):
        CompiledForward(replace(PLAIN, **changes), {}, num_pages=1)


def test_a_kv_cache_beyond_all_memory_is_an_error_of_its_own():
    """More than a process can address, since some systems grant more than they have."""
    config, pages = replace(CONFIGS["wide-heads"], num_layers=10), 2**31 - 1
    assert kv_bytes_per_page(config) * pages > 1 << 47
    with pytest.raises(OutOfMemory, match="fewer pages"):
        compiled(config, num_pages=pages)


def test_memory_of_a_page():
    assert kv_bytes_per_page(PLAIN) == 1 * 2 * 2 * 32 * 16 * 2  # layers, K and V, kv heads, head_dim, slots, bf16


def test_programs_can_come_and_go():
    for _ in range(3):
        forward = compiled(PLAIN, num_pages=4)
        forward(rows_of((TOKENS, 0, 20, [2, 1])))
        del forward
        gc.collect()


def test_two_threads_may_call_at_once():
    forwards = [compiled(PLAIN, num_pages=12, threads=2) for _ in range(2)]
    batch = rows_of((TOKENS, 0, 150, PAGES))
    wanted = forwards[0](batch).logits.clone()
    with ThreadPoolExecutor(2) as workers:
        for _ in range(10):
            results = workers.map(lambda forward: forward(batch).logits.clone(), forwards)
            assert all(torch.equal(logits, wanted) for logits in results)


def test_rows_may_grow_and_shrink():
    forward = compiled(PLAIN, num_pages=12, threads=2)
    wanted = forward(rows_of((TOKENS, 0, 150, PAGES))).logits.clone()
    for size in (1, 40, 3, 150, 17):
        assert torch.equal(forward(rows_of((TOKENS, 0, size, PAGES))).logits, wanted[:size])
