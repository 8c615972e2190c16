"""The interpreter's products and sums have one order of additions, on any CPU and in blocks of any shape."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.cuda.conftest import DEEP, ON_GPU

INNER, WIDE = 64, 32
pytestmark = pytest.mark.skipif(ON_GPU, reason="about the interpreter")


@triton.jit
def product_and_sums(a, b, products, sums, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr):
    row, column, inner = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS), tl.arange(0, INNER)
    left = tl.load(a + row * INNER + inner[None, :])
    right = tl.load(b + inner[:, None] * COLUMNS + column[None, :])
    tl.store(products + row * COLUMNS + column[None, :], tl.dot(left, right, input_precision="ieee"))
    tl.store(sums + tl.arange(0, ROWS), tl.sum(left, axis=1))


def computed(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    products, sums = torch.empty(len(a), b.shape[1]), torch.empty(len(a))
    product_and_sums[(1,)](a.contiguous(), b.contiguous(), products, sums, len(a), b.shape[1], INNER)
    return products, sums


def by_halves(terms: list[np.float32]) -> np.float32:
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [one + other for one, other in zip(terms[:half], terms[half:], strict=True)]
    return terms[0]


def product_by_hand(row: np.ndarray, column: np.ndarray) -> float:
    total = np.float32(0)
    for first in range(0, INNER, DEEP):
        total = total + by_halves([row[k] * column[k] for k in range(first, first + DEEP)])
    return float(total)


def test_an_element_is_the_same_in_blocks_of_any_shape() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator) for shape in ((WIDE, INNER), (INNER, WIDE)))
    products, sums = computed(a, b)
    left, right = a.numpy(), b.numpy()
    for row, column in ((0, 0), (5, 17), (31, 31)):
        assert products[row, column] == product_by_hand(left[row], right[:, column])
        assert sums[row] == by_halves([*left[row]])
    for rows, columns in ((1, WIDE), (16, 1), (4, 8)):
        fewer, less = computed(a[:rows], b[:, :columns])
        assert torch.equal(fewer, products[:rows, :columns])
        assert torch.equal(less, sums[:rows])
