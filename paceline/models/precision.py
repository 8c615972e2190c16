"""Error of quantisation: the distance of each kind of matrix from its float original.

The measure is the relative Frobenius error |quantised - original| / |original|: 0 is exact, 1 is as bad as a matrix of
zeros. It judges matrices one by one, not the text that the model generates with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.quant import Float8, Quantised, Weight, dequantise

KINDS = ("q", "k", "v", "o", "gate", "up", "down", "embed", "head")
PIECE = 1 << 24  # weights compared at a time; bounds the float32 copies


@dataclass(frozen=True, slots=True)
class KindError:
    """Relative Frobenius errors of all matrices of one kind, one per layer."""

    kind: str
    format: str  # format of the first matrix
    matrices: int
    mean: float
    max: float
    worst: str  # name of the matrix with the largest error


def quantisation_report(originals: Iterable[tuple[str, Tensor]], weights: Mapping[str, Weight]) -> list[KindError]:
    """Report one entry per kind, in the order of KINDS. `originals` may be a generator; vectors are skipped."""
    found: dict[str, list[tuple[float, str]]] = {}
    for name, original in originals:
        if original.dim() == 2:
            found.setdefault(kind_of(name), []).append((relative_error(original, weights[name]), name))
    return [_summary(kind, found[kind], weights) for kind in KINDS if kind in found]


def kind_of(name: str) -> str:
    """Return the kind of a matrix, the last part of its name: `layers.3.q` → `q`."""
    return name.rpartition(".")[2]


def relative_error(original: Tensor, weight: Weight) -> float:
    """Compute |weight - original| / |original| in pieces of rows: a float32 copy of a whole matrix can be large."""
    rows = max(1, PIECE // original.shape[1])
    moved = torch.zeros((), dtype=torch.float64, device=original.device)
    norm = torch.zeros_like(moved)
    for start in range(0, len(original), rows):
        piece = slice(start, start + rows)
        exact = original[piece].float()
        moved += (_floats(weight, piece).to(exact.device) - exact).square().sum(dtype=torch.float64)
        norm += exact.square().sum(dtype=torch.float64)
    return float((moved / norm).sqrt()) if norm > 0 else float(moved.sqrt())


def _floats(weight: Weight, rows: slice) -> Tensor:
    return weight[rows].float() if isinstance(weight, Tensor) else dequantise(weight.each(lambda part: part[rows]))


def _summary(kind: str, errors: list[tuple[float, str]], weights: Mapping[str, Weight]) -> KindError:
    largest, worst = max(errors)
    return KindError(
        kind=kind,
        format=format_name(weights[errors[0][1]]),
        matrices=len(errors),
        mean=sum(error for error, _ in errors) / len(errors),
        max=largest,
        worst=worst,
    )


def format_name(weight: Weight) -> str:
    if isinstance(weight, Float8):
        return "fp8"
    if isinstance(weight, Quantised):
        return f"int{weight.bits}" + (" in groups" if weight.grouped else "")
    return str(weight.dtype).removeprefix("torch.")
