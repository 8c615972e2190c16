"""Names of tensors: the canonical ones with their shapes, and the dialects of Hugging Face and GGUF.

A dialect translates the names of a file, knows which tensors may be skipped, and converts tensors that its files store
in another form than the canonical one.
"""

from __future__ import annotations

import re
from typing import Protocol

import torch
from torch import Tensor

from paceline.kernels.quant import Weight as Weight
from paceline.kernels.quant import values_of
from paceline.models.config import ModelConfig
from paceline.models.mtp_forms import is_mtp

HF_TOP = {"model.embed_tokens.weight": "embed", "model.norm.weight": "norm", "lm_head.weight": "head"}
HF_LAYER = re.compile(r"model\.layers\.(0|[1-9]\d{0,4})\.(.+?)\.(weight|bias)", re.ASCII)
HF_PARTS = {f"self_attn.{name}_proj": name for name in "qkvo"} | {
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "mlp_norm",
}
HF_POST_NORM_PARTS = {
    "post_attention_layernorm": "post_attn_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "post_mlp_norm",
}
GGUF_TOP = {"token_embd.weight": "embed", "output_norm.weight": "norm", "output.weight": "head"}
GGUF_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,4})\.(.+?)\.(weight|bias)", re.ASCII)
GGUF_PARTS = {
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "o",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "attn_norm": "attn_norm",
    "post_attention_norm": "post_attn_norm",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
    "post_ffw_norm": "post_mlp_norm",
}


class Dialect(Protocol):
    """The tensor names of one file format."""

    def canonical(self, name: str, config: ModelConfig) -> str | None:
        """Translate a file's name to the canonical one; None: there is none."""

    def harmless(self, name: str, config: ModelConfig) -> bool:
        """Whether a tensor may be skipped: the config already says what it holds, or it is part of a drafter."""

    def row_order(self, canonical: str, config: ModelConfig) -> Tensor | None:
        """Return the row of the file for each row of a canonical tensor; None: they are the same."""

    def convert(self, canonical: str, weight: Weight, config: ModelConfig) -> Weight:
        """Convert a tensor of the file to its canonical form. For matrices this is the order of rows, and no more."""


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every canonical tensor of a model, by name, in the order of use."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab_size, config.hidden_size)}
    layer = _layer_shapes(config)
    for index in range(config.num_layers):
        shapes.update({f"layers.{index}.{name}": shape for name, shape in layer.items()})
    shapes["norm"] = (config.hidden_size,)
    if not config.tied_head:
        shapes["head"] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, middle = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices = {
        "q": (queries, hidden),
        "k": (keys, hidden),
        "v": (keys, hidden),
        "o": (hidden, queries),
        "gate": (middle, hidden),
        "up": (middle, hidden),
        "down": (hidden, middle),
    }
    biased = ("q", "k", "v") * config.qkv_bias + ("o",) * config.output_bias + ("gate", "up", "down") * config.mlp_bias
    vectors = {"attn_norm": hidden, "mlp_norm": hidden} | {f"{name}.bias": matrices[name][0] for name in biased}
    if config.qk_norm:
        vectors |= {"q_norm": config.head_dim, "k_norm": config.head_dim}
    if config.post_norms:
        vectors |= {"post_attn_norm": hidden, "post_mlp_norm": hidden}
    return {**matrices, **{name: (size,) for name, size in vectors.items()}}


class HuggingFaceNames:
    """Names such as `model.layers.3.self_attn.q_proj.weight`."""

    def canonical(self, name: str, config: ModelConfig) -> str | None:
        parts = HF_PARTS | HF_POST_NORM_PARTS if config.post_norms else HF_PARTS
        return HF_TOP.get(name) or _layer_name(HF_LAYER.fullmatch(name), parts)

    def harmless(self, name: str, config: ModelConfig) -> bool:
        computed = name.endswith("rotary_emb.inv_freq") or (config.tied_head and name == "lm_head.weight")
        return computed or is_mtp(name)

    def row_order(self, canonical: str, config: ModelConfig) -> Tensor | None:
        return None

    def convert(self, canonical: str, weight: Weight, config: ModelConfig) -> Weight:
        if config.architecture == "gemma3" and canonical.endswith("norm"):
            assert isinstance(weight, Tensor)
            return weight + 1.0  # Gemma stores norm weights minus one
        return weight


class GgufNames:
    """Names such as `blk.3.attn_q.weight`."""

    def canonical(self, name: str, config: ModelConfig) -> str | None:
        return GGUF_TOP.get(name) or _layer_name(GGUF_LAYER.fullmatch(name), GGUF_PARTS)

    def harmless(self, name: str, config: ModelConfig) -> bool:
        return name == "rope_freqs.weight" or name.endswith((".attn_rot_embd.weight", ".rotary_emb.inv_freq"))

    def row_order(self, canonical: str, config: ModelConfig) -> Tensor | None:
        if config.architecture == "llama" and (match := re.search(r"\.([qk])(\.bias)?$", canonical)):
            return _half_order(config.num_heads if match[1] == "q" else config.num_kv_heads, config.head_dim)
        return None

    def convert(self, canonical: str, weight: Weight, config: ModelConfig) -> Weight:
        order = self.row_order(canonical, config)
        if order is None:
            return weight
        order = order.to(values_of(weight).device)
        return weight[order] if isinstance(weight, Tensor) else weight.each(lambda part: part[order])


def _layer_name(match: re.Match[str] | None, parts: dict[str, str]) -> str | None:
    if match is None or match[2] not in parts:
        return None
    part = parts[match[2]]
    return f"layers.{match[1]}.{part}" + (".bias" if match[3] == "bias" else "")


def _half_order(heads: int, head_dim: int) -> Tensor:
    """Undo the interleaving of rotary pairs: row 2i + s of a head goes to row s * head_dim / 2 + i."""
    return torch.arange(heads * head_dim).view(heads, -1, 2).transpose(1, 2).flatten()


HUGGING_FACE = HuggingFaceNames()
GGUF = GgufNames()
