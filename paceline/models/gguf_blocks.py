"""Convert blocks of GGUF's quantisations to tensors: exactly to float, or to integers of (nearly) the same bits.

    Q4_0   d, 32 × 4 bits       w = d·q − 8d         kept
    Q4_1   d, m, 32 × 4 bits    w = d·q + m          kept
    Q5_0   d, 32 × 5 bits       w = d·(q − 16)       kept in 8 bits: q + 112
    Q8_0   d, 32 × 8 bits       w = d·q              kept: q + 128
    Q4_K   8 groups of 32       w = d·s·q − e·m      kept, the products d·s and e·m rounded to fp16
    others                                           dequantised, then quantised again to 8 bits in groups of 32

Data is uint8 [rows, bytes of a row], copied from the file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from paceline.errors import UnsupportedModel
from paceline.kernels.quant import GROUP, Quantised, quantise

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
BlockType = GGMLQuantizationType
FLOATS = {BlockType.F32: torch.float32, BlockType.F16: torch.float16, BlockType.BF16: torch.bfloat16}


def float_rows(data: Bytes, kind: BlockType, where: str) -> Tensor:
    """Convert rows to floats [rows, k]: F16 and BF16 keep their dtype, everything else becomes float32."""
    if kind in FLOATS:
        return torch.from_numpy(data.copy()).view(FLOATS[kind])
    try:
        with np.errstate(all="ignore"):  # the loader checks that weights are finite
            values = dequantize(data, kind)
    except NotImplementedError as error:
        raise UnsupportedModel(f"{where} is {kind.name}, which the gguf package cannot dequantise") from error
    return torch.from_numpy(np.ascontiguousarray(values, np.float32))


def native_rows(data: Bytes, kind: BlockType, where: str) -> Tensor | Quantised:
    """Convert rows [rows, k] to the kernels' own format that is nearest to the file's."""
    if kind in FLOATS:
        return float_rows(data, kind, where)
    if kind not in KEPT:
        return quantise(float_rows(data, kind, where), bits=8, group=GROUP)
    return KEPT[kind](data)


def _blocks(data: Bytes, size: int) -> Bytes:
    return data.reshape(len(data), -1, size)  # [rows, blocks, bytes of a block]


def _halves(blocks: Bytes, at: int) -> Tensor:
    """Read the fp16 number at byte `at` of each block as float32 [rows, blocks]."""
    return torch.from_numpy(np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0].astype(np.float32))


def _nibbles(packed: Bytes) -> Tensor:
    """Unpack runs of bytes [rows, runs, n] to uint8 [rows, runs * 2n]: first the low, then the high halves of a run."""
    both = np.stack([packed & 0x0F, packed >> 4], axis=2)  # [rows, runs, 2, n]
    return torch.from_numpy(both.reshape(len(packed), -1))


def _q4_0(data: Bytes) -> Quantised:
    blocks = _blocks(data, 18)
    scale = _halves(blocks, 0)
    return Quantised(q=_nibbles(blocks[..., 2:]), scale=scale, minimum=-8 * scale, bits=4)


def _q4_1(data: Bytes) -> Quantised:
    blocks = _blocks(data, 20)
    return Quantised(q=_nibbles(blocks[..., 4:]), scale=_halves(blocks, 0), minimum=_halves(blocks, 2), bits=4)


def _q5_0(data: Bytes) -> Quantised:
    blocks = _blocks(data, 22)
    scale = _halves(blocks, 0)
    bits = np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little")  # fifth bits, lowest byte first
    q = _nibbles(blocks[..., 6:]) | torch.from_numpy((bits << 4).reshape(len(data), -1))
    return Quantised(q=q + 112, scale=scale, minimum=-128 * scale, bits=8)


def _q8_0(data: Bytes) -> Quantised:
    blocks = _blocks(data, 34)
    scale = _halves(blocks, 0)
    q = (blocks[..., 2:] ^ 0x80).reshape(len(data), -1)  # adds 128: the sign bit is flipped
    return Quantised(q=torch.from_numpy(q), scale=scale, minimum=-128 * scale, bits=8)


def _q4_k(data: Bytes) -> Quantised:
    blocks = _blocks(data, 144)
    scales, minima = _six_bit_pairs(blocks[..., 4:16])  # [rows, blocks, 8] each
    scale = (_halves(blocks, 0)[..., None] * scales).flatten(1)
    minimum = -(_halves(blocks, 2)[..., None] * minima).flatten(1)
    q = _nibbles(blocks[..., 16:].reshape(len(data), -1, 32))  # 32 bytes hold two groups
    return Quantised(q=q, scale=scale.half().float(), minimum=minimum.half().float(), bits=4)


def _six_bit_pairs(packed: Bytes) -> tuple[Tensor, Tensor]:
    """Unpack eight scales and eight minima of 6 bits each from 12 bytes, as float32 [rows, blocks, 8].

    The low 6 bits of bytes 0-3 are scales 0-3, the low 6 bits of bytes 4-7 are minima 0-3. Their top 2 bits are the top
    bits of scales 4-7 and of minima 4-7. Bytes 8-11 have the low 4 bits of scales 4-7 in their low halves, and of
    minima 4-7 in their high halves."""
    low, middle, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=-1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=-1)
    return torch.from_numpy(scales.astype(np.float32)), torch.from_numpy(minima.astype(np.float32))


KEPT: dict[BlockType, Callable[[Bytes], Quantised]] = {
    BlockType.Q4_0: _q4_0,
    BlockType.Q4_1: _q4_1,
    BlockType.Q5_0: _q5_0,
    BlockType.Q8_0: _q8_0,
    BlockType.Q4_K: _q4_k,
}
