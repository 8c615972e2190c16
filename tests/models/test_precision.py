"""The error report compares the right matrices, and its numbers follow from the definition."""

from __future__ import annotations

import pytest
import torch

from paceline.kernels.quant import GROUP, Weight, dequantise, quantise, quantise_fp8
from paceline.models import precision
from paceline.models.precision import quantisation_report, relative_error


def matrix(seed: int, rows: int = 12) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))


def test_one_entry_for_each_kind_with_its_worst_layer() -> None:
    originals = {"embed": matrix(0), "layers.0.q": matrix(1), "layers.1.q": matrix(2), "norm": torch.ones(64)}
    weights: dict[str, Weight] = {
        "embed": quantise(originals["embed"]),
        "layers.0.q": quantise(originals["layers.0.q"], bits=4, group=GROUP),
        "layers.1.q": quantise(originals["layers.1.q"] * 1.5, bits=4, group=GROUP),
        "norm": originals["norm"],
    }
    q, embed = quantisation_report(originals.items(), weights)
    errors = [relative_error(originals[name], weights[name]) for name in ("layers.0.q", "layers.1.q")]
    assert (q.kind, q.format, q.matrices, q.worst) == ("q", "int4 in groups", 2, "layers.1.q")
    assert (q.mean, q.max) == (pytest.approx(sum(errors) / 2), errors[1])
    assert (embed.kind, embed.format, embed.matrices) == ("embed", "int8", 1)
    assert embed.max < 0.01 < errors[0] < 0.1 < 0.4 < errors[1] < 0.6


def test_the_error_is_the_relative_frobenius_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    original = matrix(3)
    eight = quantise_fp8(original)
    wanted = float((dequantise(eight) - original).norm() / original.norm())
    assert relative_error(original, eight) == pytest.approx(wanted, rel=1e-5)
    monkeypatch.setattr(precision, "PIECE", 5 * 64)
    assert relative_error(original, eight) == pytest.approx(wanted, rel=1e-5)
    assert relative_error(original, original.bfloat16()) < 0.003
    assert relative_error(original, original) == 0


def test_a_matrix_of_zeros_has_no_error_of_its_own() -> None:
    assert relative_error(torch.zeros(2, 32), quantise(torch.zeros(2, 32))) == 0
