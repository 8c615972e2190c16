"""How a trained drafter's matrices are written: bfloat16, or 8 bits with one scale a row.

The scales of NAME are `NAME_scale`, float32 [rows, 1]. Vectors are always float32: they are small, and products read
them as they are. The fusion of features is never of 8 bits: some features are a hundred times larger than others, so
its columns differ by as much, and the small ones would be rounded away.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

FUSION = "fc.weight"

Packing = Literal["bf16", "int8"]
PACKINGS: tuple[Packing, ...] = ("bf16", "int8")


def packed(tensors: Mapping[str, Tensor], packing: Packing) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2:
            out[name] = tensor.float()
        elif packing == "bf16" or name == FUSION:
            out[name] = tensor.to(torch.bfloat16)
        else:
            scale = tensor.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
            out[name] = (tensor.float() / scale).round().to(torch.int8)
            out[f"{name}_scale"] = scale
    return out


def unpacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All as float32, without the scales."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.int8:
            out[name] = tensor.float() * tensors[f"{name}_scale"].float()
        elif not (name.endswith("_scale") and name.removesuffix("_scale") in tensors):
            out[name] = tensor.float() if tensor.is_floating_point() else tensor
    return out
