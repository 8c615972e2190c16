"""What distinguishes one decoder from another: one frozen record whose fields are the variants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0  # llama3 only, as are the next two
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder. Norm weights are stored ready to multiply (Gemma's +1 is applied at load)."""

    architecture: str  # "llama", "mistral", "qwen2", "qwen3", "gemma3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None  # layers with a window use this one (Gemma 3), unscaled
    windows: tuple[int, ...] = ()  # sliding window of each layer, 0: none; () means none anywhere
    attention_scale: float | None = None  # None: head_dim ** -0.5
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False  # norms after attention and MLP as well (Gemma 3)
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embedding_scale: float = 1.0
    tied_head: bool = False
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
