"""Packing and requantising weights for the CUDA kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paceline.kernels.cuda.formats import CHANNEL, FLOAT, FLOAT8, GROUPED, NIBBLES, CudaMatrix, pack, requantise
from paceline.kernels.quant import Weight, quantise, quantise_fp8

MAKERS: dict[str, tuple[Callable[[torch.Tensor], Weight], int]] = {
    "int8": (lambda weight: quantise(weight, bits=8), CHANNEL),
    "fp8": (quantise_fp8, FLOAT8),
    "int4": (lambda weight: quantise(weight, bits=4, group=32), NIBBLES),
}


def same(one: CudaMatrix, other: CudaMatrix) -> bool:
    pairs = [(getattr(one, name), getattr(other, name)) for name in CudaMatrix.__slots__]
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def floats(device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    drawn = torch.randn((10, 128), generator=random), torch.randn(10, generator=random)
    return drawn[0].to(device, dtype), drawn[1].to(device)


@pytest.mark.parametrize("format", MAKERS)
def test_fewer_bits_of_the_same_numbers(format: str, device: torch.device, dtype: torch.dtype) -> None:
    weight, bias = floats(device, dtype)
    make, kind = MAKERS[format]
    whole = pack([weight], parts=2, biases=[bias], dtype=dtype, device=device)
    small = requantise(whole, format, parts=whole.parts)
    assert (whole.format, small.format, small.parts) == (FLOAT, kind, 2)
    assert same(small, pack([make(weight)], parts=2, biases=[bias], dtype=dtype, device=device))
    assert small.bytes < whole.bytes
    assert small.bias is not None
    assert torch.equal(small.bias, bias)


def test_rows_are_quantised_by_themselves(device: torch.device, dtype: torch.dtype) -> None:
    """A packed matrix of q, k and v has the numbers that each would have alone."""
    weight, _ = floats(device, dtype)
    apart = [quantise_fp8(weight[:4]), quantise_fp8(weight[4:])]
    together = requantise(pack([weight], parts=1, dtype=dtype, device=device), "fp8", parts=1)
    assert same(together, pack(apart, parts=1, dtype=dtype, device=device))


@pytest.mark.parametrize("format", MAKERS)
def test_what_has_few_bits_stays(format: str, device: torch.device, dtype: torch.dtype) -> None:
    weight, _ = floats(device, dtype)
    for make, _ in MAKERS.values():
        matrix = pack([make(weight)], parts=1, dtype=dtype, device=device)
        assert requantise(matrix, format, parts=1) is matrix


def test_four_bits_of_an_odd_number_of_groups_are_not_paired(device: torch.device, dtype: torch.dtype) -> None:
    weight, _ = floats(device, dtype)
    matrix = requantise(pack([weight[:, :96]], parts=1, dtype=dtype, device=device), "int4", parts=1)
    assert (matrix.format, matrix.q.shape) == (GROUPED, (10, 96))
