"""Formats of a trained drafter's matrices: bfloat16, 8 bits with one scale per row, or 4 bits in groups of 32.

    int8   NAME  int8 [n, k]            NAME_scale  float32 [n, 1]
    int4   NAME  uint8 [n, k / 2]       NAME_scale, NAME_minimum  float16 [n, k / 32]; two values a byte

Vectors are always float32: they are small, and products read them as they are. The fusion of features is always
bfloat16: some features are a hundred times larger than others, its columns differ by as much, and few bits would round
the small ones away. A drafter that is written in 4 bits is trained in 4 bits: its forward pass uses `rounded_weights`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from paceline.errors import ModelFileError
from paceline.kernels.quant import GROUP, Quantised, dequantise, pack_nibbles, quantise, unpack_nibbles

FUSION = "fc.weight"
MTP_FUSION = "mtp_layers.0.input_proj.weight"

Packing = Literal["bf16", "int8", "int4"]
PACKINGS: tuple[Packing, ...] = get_args(Packing)


def packed(tensors: Mapping[str, Tensor], packing: Packing) -> dict[str, Tensor]:
    """Return the tensors of the file, with scales and minimums."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2:
            out[name] = tensor.float()
        elif packing == "bf16" or name in (FUSION, MTP_FUSION):
            out[name] = tensor.to(torch.bfloat16)
        elif _in_4_bits(name, tensor, packing):
            weight = quantise(tensor, bits=4, group=GROUP)
            out[name] = pack_nibbles(weight.q)
            out |= {f"{name}_scale": weight.scale.half(), f"{name}_minimum": weight.minimum.half()}
        else:
            scale = tensor.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
            out[name] = (tensor.float() / scale).round().to(torch.int8)
            out[f"{name}_scale"] = scale
    return out


def unpacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the tensors of a file to float32, without scales and minimums; integer tables stay as they are."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.int8:
            out[name] = tensor.float() * _beside(tensors, name, "_scale")
        elif tensor.dtype == torch.uint8:
            scale, minimum = _beside(tensors, name, "_scale"), _beside(tensors, name, "_minimum")
            out[name] = dequantise(Quantised(unpack_nibbles(tensor), scale, minimum, bits=4))
        elif not any(name.endswith(end) and name.removesuffix(end) in tensors for end in ("_scale", "_minimum")):
            out[name] = tensor.float() if tensor.is_floating_point() else tensor
    return out


def rounded_weights(params: Mapping[str, Tensor], packing: Packing, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights of one batch: matrices rounded as in the file, in the dtype of the arithmetic. Gradients reach
    the parameters."""
    written = as_written(params, packing)
    return {name: param.to(dtype) if param.dim() == 2 else param for name, param in written.items()}


def as_written(params: Mapping[str, Tensor], packing: Packing) -> dict[str, Tensor]:
    """Round tensors as 4 bits will round them, and pass gradients straight through. Formats of more bits leave a tensor
    as it is: their rounding is too small to matter in training.

    A group of inputs is rounded by itself, so the groups of all matrices are rounded together: a hundred launches on a
    GPU, not a hundred for each matrix."""
    coarse = [name for name, param in params.items() if _in_4_bits(name, param, packing)]
    if not coarse:
        return dict(params)
    with torch.no_grad():
        groups = torch.cat([params[name].reshape(-1, GROUP) for name in coarse])
        lost = dequantise(quantise(groups, bits=4, group=GROUP)) - groups
        parts = torch.split(lost, [params[name].numel() // GROUP for name in coarse])
    rounded = {name: params[name] + part.view(params[name].shape) for name, part in zip(coarse, parts, strict=True)}
    return {**params, **rounded}


def _in_4_bits(name: str, tensor: Tensor, packing: Packing) -> bool:
    """Whether this tensor is written in 4 bits. A matrix whose inputs do not fill whole groups takes 8."""
    return packing == "int4" and tensor.dim() == 2 and name not in (FUSION, MTP_FUSION) and tensor.shape[1] % GROUP == 0


def _beside(tensors: Mapping[str, Tensor], name: str, end: str) -> Tensor:
    if name + end not in tensors:
        raise ModelFileError(f"tensor {name + end!r} is missing beside {name!r}")
    return tensors[name + end].float()
