"""Weight matrices in the formats of the CUDA kernels: floats of the activations' type, or fewer bits with scales.

    FLOAT    q [n, k] of the activations' type
    CHANNEL  q int8 [n, k],                   w = q · scale[n]
    FLOAT8   q int16 [n, k / 2], e4m3 pairs,  w = q · scale[n]
    GROUPED  q uint8 [n, k],                  w = q · scale[k / 32, n, 0] + scale[k / 32, n, 1]
    NIBBLES  q uint8 [n, k / 2], 4 bits,      w = q · scale[k / 32, n, 0] + scale[k / 32, n, 1]

The scales and minimums of a group lie side by side for all outputs, so that a tile of outputs reads them in one load.
NIBBLES packs 64 inputs into 32 bytes: the first 32 inputs in the low halves, the other 32 in the high halves. FLOAT8
packs 128 inputs into 64 pairs: the first 64 are low bytes, the other 64 high ones; zeros fill the last 128. A gated
matrix has the outputs of gate and up in turns (gate 0, up 0, gate 1, …), so that a tile of outputs has both. `parts`
is the number of ranges of K that a sum is divided into, see `linear`; it depends on the matrix, never on a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from paceline.kernels.quant import GROUP, Float8, Quantised, dequantise, quantise, quantise_fp8, values_of

FLOAT, CHANNEL, GROUPED, NIBBLES, FLOAT8 = 0, 1, 2, 3, 4
PAIRS = 64  # pairs of FLOAT8 that lie together


@dataclass(frozen=True, slots=True)
class CudaMatrix:
    """A weight matrix [outputs, inputs] with its bias, on the device."""

    q: Tensor
    outputs: int
    inputs: int
    format: int  # FLOAT, CHANNEL, …
    parts: int
    scale: Tensor | None = None  # float32 [n]; or [groups, n, 2] with minimums, in fp16 if that is exact, else float32
    bias: Tensor | None = None  # float32 [n]
    floats: CudaMatrix | None = None  # the same numbers as floats, for products of many rows

    @property
    def bytes(self) -> int:
        own = sum(tensor.nbytes for tensor in (self.q, self.scale, self.bias) if tensor is not None)
        return own if self.floats is None else own + self.floats.q.nbytes


def pack(
    weights: Sequence[Tensor | Quantised | Float8],
    *,
    parts: int,
    gated: bool = False,
    biases: Sequence[Tensor] = (),
    dtype: torch.dtype,
    device: torch.device | str,
) -> CudaMatrix:
    """Pack the rows of all `weights` into one matrix, one after another, or in turns for the gate and up of a `gated`
    one. Weights of different formats become `dtype`."""
    join = _in_turns if gated else torch.cat
    if len({type(weight) for weight in weights}) > 1:
        weights = [weight if isinstance(weight, Tensor) else dequantise(weight) for weight in weights]
    bias = join([bias.float().to(device) for bias in biases]) if biases else None
    inputs = values_of(weights[0]).shape[1]
    outputs = sum(len(values_of(weight)) for weight in weights)
    q, scale, format = _join(weights, join, dtype=dtype, device=device)
    return CudaMatrix(q=q, outputs=outputs, inputs=inputs, format=format, parts=parts, scale=scale, bias=bias)


def requantise(matrix: CudaMatrix, format: str, *, parts: int) -> CudaMatrix:
    """Quantise a matrix of floats to "int8", "fp8" or "int4"; one that is already quantised stays as it is."""
    if matrix.format != FLOAT:
        return matrix
    makers: dict[str, Callable[[Tensor], Quantised | Float8]] = {
        "int8": lambda weight: quantise(weight, bits=8),
        "fp8": quantise_fp8,
        "int4": lambda weight: quantise(weight, bits=4, group=GROUP),
    }
    biases = [] if matrix.bias is None else [matrix.bias]
    return pack([makers[format](matrix.q)], parts=parts, biases=biases, dtype=matrix.q.dtype, device=matrix.q.device)


Join = Callable[[list[Tensor]], Tensor]
Joined = tuple[Tensor, Tensor | None, int]  # q, scale, format


def _in_turns(pair: list[Tensor]) -> Tensor:
    """Join gate and up, or their scales or biases, in turns."""
    return torch.stack(pair, dim=1).flatten(0, 1)


def _join(
    weights: Sequence[Tensor | Quantised | Float8], join: Join, *, dtype: torch.dtype, device: torch.device | str
) -> Joined:
    floats = [weight for weight in weights if isinstance(weight, Tensor)]
    if floats:
        return join([weight.to(device=device, dtype=dtype) for weight in floats]), None, FLOAT
    eights = [weight for weight in weights if isinstance(weight, Float8)]
    if eights:
        q = join([weight.q.to(device).view(torch.uint8) for weight in eights])
        return _paired(q), join([weight.scale.to(device).flatten() for weight in eights]), FLOAT8
    return _join_quantised([weight for weight in weights if isinstance(weight, Quantised)], join, device)


def _paired(bytes: Tensor) -> Tensor:
    """Pack bytes [n, k] into pairs int16 [n, k / 2], with zeros behind the last inputs."""
    filled = functional.pad(bytes, (0, -bytes.shape[1] % (2 * PAIRS)))
    return filled.view(len(bytes), -1, 2, PAIRS).transpose(2, 3).contiguous().view(torch.int16).flatten(1)


def _join_quantised(weights: Sequence[Quantised], join: Join, device: torch.device | str) -> Joined:
    q = join([weight.q.to(device) for weight in weights])
    if not any(weight.grouped for weight in weights) and all(weight.symmetric for weight in weights):
        scale = join([weight.scale.to(device).flatten() for weight in weights])
        return (q.to(torch.int16) - 128).to(torch.int8), scale, CHANNEL
    groups = q.shape[1] // GROUP
    # Scales of groups are representable in fp16; the one scale of a channel need not be.
    dtype = torch.float16 if all(weight.grouped for weight in weights) else torch.float32
    sides = [
        join([side.to(device, dtype).expand(-1, groups) for side in pair])
        for pair in ([weight.scale for weight in weights], [weight.minimum for weight in weights])
    ]
    scale = torch.stack([side.T for side in sides], dim=2)
    if all(weight.bits == 4 for weight in weights) and q.shape[1] % (2 * GROUP) == 0:
        halves = q.view(len(q), -1, 2, GROUP)
        return (halves[:, :, 0] | (halves[:, :, 1] << 4)).flatten(1).contiguous(), scale, NIBBLES
    return q, scale, GROUPED


@triton.jit
def stored(q, n, k, known, inputs, FORMAT: tl.constexpr):
    """Load numbers of any format as float32, without their scales."""
    if FORMAT == 3:  # NIBBLES
        bytes = tl.load(q + n * (inputs // 2) + k // 64 * 32 + k % 32, mask=known, other=0)
        value = tl.where(k % 64 < 32, bytes & 15, bytes >> 4)
    elif FORMAT == 4:  # FLOAT8
        pairs = tl.load(q + n * (tl.cdiv(inputs, 128) * 64) + k // 128 * 64 + k % 64, mask=known, other=0)
        bytes = tl.where(k % 128 < 64, pairs, pairs >> 8).to(tl.uint8)
        value = bytes.to(tl.float8e4nv, bitcast=True)
    else:
        value = tl.load(q + n * inputs + k, mask=known, other=0)
    return value.to(tl.float32)
