"""Quantised matrices: their error, scales in fp16, and products whose rows do not depend on each other."""

from __future__ import annotations

import pytest
import torch

from paceline.kernels import quant
from paceline.kernels.quant import (
    GROUP,
    Quantised,
    dequantise,
    float8_linear,
    quantise,
    quantise_fp8,
    quantise_inputs,
    quantised_linear,
)
from paceline.kernels.reference import embed, linear

FORMATS = [(8, None), (8, GROUP), (4, GROUP)]


def weights(n: int = 24, k: int = 96) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 2, n)[:, None]


@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_a_weight_moves_by_about_half_a_step_at_most(bits, group):
    weight = weights()
    quantised = quantise(weight, bits=bits, group=group)
    steps = (dequantise(quantised) - weight).view(24, quantised.scale.shape[1], -1).abs() / quantised.scale[..., None]
    assert steps.mean() < 0.3
    assert steps.max() < (0.6 if bits == 8 else 1.7)  # 4 bits may clip an outlier to serve the others
    assert int(quantised.q.max()) < 2**bits


def test_clipping_is_only_chosen_where_it_is_nearer():
    weight = weights()
    quantised = quantise(weight, bits=4, group=GROUP)
    blocks = weight.view(24, -1, GROUP)
    low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
    whole = ((blocks - low) / (high - low) * 15).round() / 15 * (high - low) + low
    errors = (dequantise(quantised).view_as(blocks) - blocks).square().sum(-1)
    assert (errors < (whole - blocks).square().sum(-1) * 1.02).all()
    assert errors.sum() < 0.97 * (whole - blocks).square().sum()


@pytest.mark.parametrize("bits", [8, 4])
def test_group_constants_are_fp16_numbers(bits):
    quantised = quantise(weights(), bits=bits, group=GROUP)
    assert torch.equal(quantised.scale.half().float(), quantised.scale)
    assert torch.equal(quantised.minimum.half().float(), quantised.minimum)


@pytest.mark.parametrize("group", [None, GROUP])
def test_8_bits_are_symmetric_and_keep_zero(group):
    weight = weights()
    weight[:, ::3] = 0
    quantised = quantise(weight, bits=8, group=group)
    assert quantised.symmetric
    assert (dequantise(quantised)[:, ::3] == 0).all()


@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_a_constant_matrix_survives(bits, group):
    for value in (0.0, 0.25, -3.0):
        got = dequantise(quantise(torch.full((3, 64), value), bits=bits, group=group))
        torch.testing.assert_close(got, torch.full((3, 64), value), rtol=1e-3, atol=0)


@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_a_product_is_near_the_float_one(bits, group):
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(1))
    weight, bias = quantise(weights(), bits=bits, group=group), torch.linspace(-1, 1, 24)
    wanted = x @ dequantise(weight).T + bias
    error = (quantised_linear(x, weight, bias) - wanted).std(dim=0) / wanted.std(dim=0)  # of each output
    assert error.median() < 0.01
    assert error.max() < 0.05


@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_a_product_is_exact_where_inputs_are_integers(bits, group):
    x = torch.randint(-127, 128, (5, 96), generator=torch.Generator().manual_seed(2)).float()
    x[:, ::GROUP] = 127  # so that every scale is 1
    weight = quantise(weights(), bits=bits, group=group)
    wanted = (x.double() @ dequantise(weight).double().T).float()
    torch.testing.assert_close(quantised_linear(x, weight), wanted, rtol=1e-5, atol=1e-5 * float(wanted.std()))


@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_rows_of_a_product_do_not_know_of_each_other(bits, group):
    x, weight = (
        torch.randn(33, 96, generator=torch.Generator().manual_seed(3)),
        quantise(weights(), bits=bits, group=group),
    )
    together = quantised_linear(x, weight)
    for rows in (slice(0, 1), slice(5, 12), slice(32, 33)):
        assert torch.equal(quantised_linear(x[rows], weight), together[rows])


def test_inputs_of_zero_and_of_one_huge_value():
    x = torch.zeros(1, 64)
    x[0, 40] = -1e30
    q, scale = quantise_inputs(x)
    assert q[0, 0].abs().sum() == 0
    assert q[0, 1, 8] == -127
    assert scale[0, 0] == 0


def test_a_matrix_of_4_bits_is_grouped_even_with_one_group():
    assert quantise(torch.randn(4, 32), bits=4, group=GROUP).grouped
    assert not quantise(torch.randn(4, 32)).grouped


def test_formats_without_a_kernel_are_refused():
    with pytest.raises(AssertionError, match="no kernel for 4 bits"):
        quantise(torch.randn(4, 32), bits=4)
    with pytest.raises(AssertionError, match="33 inputs"):
        quantise(torch.randn(4, 33), bits=8, group=GROUP)


def test_asymmetry_is_noticed():
    weight = quantise(torch.randn(4, 64))
    assert not Quantised(q=weight.q, scale=weight.scale, minimum=weight.minimum * 1.01, bits=8).symmetric


def test_8_bit_floats_are_as_near_as_their_mantissa():
    weight = weights()
    eight = quantise_fp8(weight)
    top = weight.abs().amax(dim=1, keepdim=True)
    error = (dequantise(eight) - weight).abs()
    smallest = top / 224 * 2**-10  # half a step of the subnormals
    assert (error <= weight.abs() / 16 * 1.001 + smallest).all()
    assert eight.q.dtype == torch.float8_e4m3fn
    assert eight.scale.shape == (24, 1)
    assert (eight.scale.frexp().mantissa == 0.5).all(), "a scale is no power of two"
    assert (eight.q.float().abs().amax(dim=1) >= 224).all()


@pytest.mark.parametrize("value", [0.0, 0.25, -3.0, 1e-30, 1e30])
def test_8_bit_floats_of_a_constant(value):
    constant = torch.full((3, 8), value)
    torch.testing.assert_close(dequantise(quantise_fp8(constant)), constant, rtol=1 / 16, atol=0)


def test_a_product_with_8_bit_floats():
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(1))
    eight, bias = quantise_fp8(weights()), torch.linspace(-1, 1, 24)
    exact = dequantise(eight).double().T
    wanted, sizes = x.double() @ exact + bias, x.double().abs() @ exact.abs() + bias.abs()
    for product in (float8_linear, linear):
        error = (product(x, eight, bias) - wanted).abs()
        assert (error <= 100 * 2.0**-24 * sizes).all(), "more than a rounding for each of 96 products, in any order"
    assert linear(x.bfloat16(), eight).dtype == torch.bfloat16


def test_rows_of_an_8_bit_embedding():
    eight = quantise_fp8(weights())
    assert torch.equal(embed(torch.tensor([5, 0, 5]), eight, torch.float32), dequantise(eight)[[5, 0, 5]])


def test_pieces_do_not_change_a_matrix(monkeypatch):
    weight = weights()
    whole, eight = quantise(weight, bits=4, group=GROUP), quantise_fp8(weight)
    monkeypatch.setattr(quant, "CPU_PIECE", 5 * 96)
    parts, eights = quantise(weight, bits=4, group=GROUP), quantise_fp8(weight)
    assert torch.equal(dequantise(parts), dequantise(whole))
    assert torch.equal(dequantise(eights), dequantise(eight))
