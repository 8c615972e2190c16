"""The multiply-adds of a prompt, against a count of every product, and the seconds at the arithmetic limit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.bench.arithmetic import Arithmetic, prompt_arithmetic
from paceline.kernels.cpu.limits import Limits, measure_limits
from paceline.models.tensor_names import expected_shapes
from tests.kernels.tiny_forward import CONFIGS, PLAIN


@pytest.mark.parametrize("name", ["plain", "many-heads", "two-layers", "tied"])
@pytest.mark.parametrize("length", [1, 7, 130])
def test_products_are_those_of_all_matrices(name: str, length: int) -> None:
    config = CONFIGS[name]
    head = config.hidden_size * config.vocab_size
    shapes = {key: shape for key, shape in expected_shapes(config).items() if len(shape) == 2}
    layers = sum(rows * columns for key, (rows, columns) in shapes.items() if (rows, columns) != (90, 64))
    assert prompt_arithmetic(config, length).products == length * layers + head


@pytest.mark.parametrize("windows", [(), (0,), (1,), (5,), (130,), (200,)])
def test_attention_counts_what_each_row_sees(windows: tuple[int, ...]) -> None:
    config = replace(PLAIN, windows=windows)
    seen = [min(row + 1, (windows or (0,))[0] or row + 1) for row in range(130)]
    assert prompt_arithmetic(config, 130).attention == 2 * config.num_heads * config.head_dim * sum(seen)


def test_seconds_at_the_limit() -> None:
    limits = Limits(variant="avx2", threads=2, bytes=1000.0, floats=100.0)
    assert Arithmetic(products=3000, attention=200).seconds(limits) == 5.0


@pytest.mark.parametrize("threads", [1, 2])
def test_limits_are_measured(threads: int) -> None:
    limits = measure_limits(threads)
    assert limits.threads == threads
    assert min(limits.bytes, limits.floats) > 1e6, "a multiply-add takes less than a microsecond on any CPU"
    assert max(limits.bytes, limits.floats) < 1e13 * threads, "a product that the compiler has moved out of its loop"
