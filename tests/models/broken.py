"""A valid tiny GGUF file as bytes, written field by field so that a test can falsify any of them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

U32, F32, STRING, ARRAY = 4, 6, 8, 9
Tensor = tuple[str, tuple[int, ...], int, int | None]  # name, shape as the file spells it, type, offset (None: next)
SHAPES = {
    "attn_norm": (32,),
    "attn_q": (32, 32),
    "attn_k": (32, 16),
    "attn_v": (32, 16),
    "attn_output": (32, 32),
    "ffn_norm": (32,),
    "ffn_gate": (32, 64),
    "ffn_up": (32, 64),
    "ffn_down": (64, 32),
}
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.tokens": [f"t{index}" for index in range(16)],
}


def tensors() -> list[Tensor]:
    """One layer: vectors in F32, matrices in Q8_0."""
    layer: list[Tensor] = [
        (f"blk.0.{name}.weight", shape, 0 if len(shape) == 1 else 8, None) for name, shape in SHAPES.items()
    ]
    return [("token_embd.weight", (32, 16), 8, None), *layer, ("output_norm.weight", (32,), 0, None)]


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value(item: Any) -> bytes:
    """Type and value of a metadata entry."""
    if isinstance(item, str):
        return struct.pack("<I", STRING) + text(item)
    if isinstance(item, float):
        return struct.pack("<If", F32, item)
    if isinstance(item, list):
        kind = struct.unpack("<I", value(item[0])[:4])[0]
        return struct.pack("<IIQ", ARRAY, kind, len(item)) + b"".join(value(element)[4:] for element in item)
    return struct.pack("<II", U32, item)


def size_of(shape: tuple[int, ...], kind: int) -> int:
    count = int(np.prod(shape))
    return count * 4 if kind == 0 else count // 32 * 34


def build(
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    tensor_count: int | None = None,
    key_count: int | None = None,
    metadata: dict[str, Any] | None = None,
    raw_metadata: bytes = b"",
    infos: Sequence[Tensor] | None = None,
    cut: int | None = None,
) -> bytes:
    metadata = METADATA if metadata is None else metadata
    infos = tensors() if infos is None else infos
    count = len(infos) if tensor_count is None else tensor_count
    keys = len(metadata) if key_count is None else key_count
    head = magic + struct.pack("<IQQ", version, count, keys)
    head += b"".join(text(key) + value(item) for key, item in metadata.items()) + raw_metadata
    data = b""
    noise = np.random.default_rng(0)
    for name, shape, kind, offset in infos:
        place = len(data) if offset is None else offset
        head += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
        head += struct.pack("<IQ", kind, place)
        data += _payload(noise, shape, kind)
        data += b"\0" * (-len(data) % 32)
    return (head + b"\0" * (-len(head) % 32) + data)[:cut]


def _payload(noise: np.random.Generator, shape: tuple[int, ...], kind: int) -> bytes:
    count = int(np.prod(shape)) if np.prod([float(side) for side in shape]) < 1e6 else 32
    if kind == 0:
        return noise.normal(size=count).astype("<f4").tobytes()
    scale = struct.pack("<e", 0.01)
    return b"".join(scale + noise.bytes(32) for _ in range(max(1, count // 32)))
