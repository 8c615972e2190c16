"""Weight matrices as the CUDA kernels read them: numbers of the activations' type, or fewer bits with scales.

    FLOAT    q [n, k] of the activations' type
    CHANNEL  q int8 [n, k],          w = q · scale[n]
    FLOAT8   q the bytes of e4m3,    the same
    GROUPED  q uint8 [n, k],         w = q · scale[n, k / 32] + minimum[n, k / 32]
    NIBBLES  q uint8 [n, k / 2],     the same, two inputs a byte: of each 64 the first 32 below, the others above

`parts` says into how many ranges of K the sum is divided, see `linear`; it belongs to the matrix, never to a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.quant import GROUP, Float8, Quantised, dequantise, quantise, quantise_fp8

FLOAT, CHANNEL, GROUPED, NIBBLES, FLOAT8 = 0, 1, 2, 3, 4


@dataclass(frozen=True, slots=True)
class Matrix:
    q: Tensor
    outputs: int
    inputs: int
    format: int
    parts: int
    scale: Tensor | None = None  # float32 [n], or [n, groups] in fp16 where that is exact
    minimum: Tensor | None = None  # as scale, of groups
    bias: Tensor | None = None  # float32 [n]

    @property
    def bytes(self) -> int:
        tensors = (self.q, self.scale, self.minimum, self.bias)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def pack(
    weights: Sequence[Tensor | Quantised | Float8],
    *,
    parts: int,
    biases: Sequence[Tensor] = (),
    dtype: torch.dtype,
    device: torch.device | str,
) -> Matrix:
    """One matrix of the rows of all `weights`; where their formats differ, in the activations' type."""
    if len({type(weight) for weight in weights}) > 1:
        weights = [weight if isinstance(weight, Tensor) else dequantise(weight) for weight in weights]
    bias = torch.cat([bias.float().to(device) for bias in biases]) if biases else None
    first = weights[0]
    inputs = first.q.shape[1] if isinstance(first, (Quantised, Float8)) else first.shape[1]
    outputs = sum(len(_rows(weight)) for weight in weights)
    q, scale, minimum, format = _join(weights, dtype=dtype, device=device)
    return Matrix(
        q=q, outputs=outputs, inputs=inputs, format=format, parts=parts, scale=scale, minimum=minimum, bias=bias
    )


def requantise(matrix: Matrix, format: str) -> Matrix:
    """The same matrix as "int8", "fp8" or "int4"; one that already has fewer bits than floats stays as it is."""
    if matrix.format != FLOAT:
        return matrix
    makers: dict[str, Callable[[Tensor], Quantised | Float8]] = {
        "int8": lambda weight: quantise(weight, bits=8),
        "fp8": quantise_fp8,
        "int4": lambda weight: quantise(weight, bits=4, group=GROUP),
    }
    biases = [] if matrix.bias is None else [matrix.bias]
    return pack(
        [makers[format](matrix.q)], parts=matrix.parts, biases=biases, dtype=matrix.q.dtype, device=matrix.q.device
    )


def _rows(weight: Tensor | Quantised | Float8) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.q


Joined = tuple[Tensor, Tensor | None, Tensor | None, int]


def _join(weights: Sequence[Tensor | Quantised | Float8], *, dtype: torch.dtype, device: torch.device | str) -> Joined:
    floats = [weight for weight in weights if isinstance(weight, Tensor)]
    if floats:
        return torch.cat([weight.to(device=device, dtype=dtype) for weight in floats]), None, None, FLOAT
    eights = [weight for weight in weights if isinstance(weight, Float8)]
    if eights:
        q = torch.cat([weight.q.to(device).view(torch.uint8) for weight in eights])
        return q, torch.cat([weight.scale.to(device).flatten() for weight in eights]), None, FLOAT8
    return _join_quantised([weight for weight in weights if isinstance(weight, Quantised)], device)


def _join_quantised(weights: Sequence[Quantised], device: torch.device | str) -> Joined:
    q = torch.cat([weight.q.to(device) for weight in weights])
    if not any(weight.grouped for weight in weights) and all(weight.symmetric for weight in weights):
        scale = torch.cat([weight.scale.to(device).flatten() for weight in weights])
        return (q.to(torch.int16) - 128).to(torch.int8), scale, None, CHANNEL
    groups = q.shape[1] // GROUP
    # Those of groups are numbers of fp16; where a channel has but one scale, it is not.
    dtype = torch.float16 if all(weight.grouped for weight in weights) else torch.float32
    scale = torch.cat([weight.scale.to(device, dtype).expand(-1, groups) for weight in weights]).contiguous()
    minimum = torch.cat([weight.minimum.to(device, dtype).expand(-1, groups) for weight in weights]).contiguous()
    if all(weight.bits == 4 for weight in weights) and q.shape[1] % (2 * GROUP) == 0:
        halves = q.view(len(q), -1, 2, GROUP)
        return (halves[:, :, 0] | (halves[:, :, 1] << 4)).flatten(1).contiguous(), scale, minimum, NIBBLES
    return q, scale, minimum, GROUPED
