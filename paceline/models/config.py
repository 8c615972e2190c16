"""The config of a decoder: one frozen record whose fields are all the ways in which architectures differ."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from paceline.errors import ModelFileError

SUPPORTED = "llama (also SmolLM2), mistral, qwen2 (also MiMo), qwen3, gemma3 (text)"
GEMMA_WINDOW_PERIOD = 6  # layers; Gemma 3's default: every sixth layer has no sliding window


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """The rule that stretches rotary frequencies beyond the trained context."""

    kind: Literal["linear", "llama3", "factors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3 only
    high_freq_factor: float = 4.0  # llama3 only
    original_context: int = 8192  # llama3 only; positions of the trained context
    factors: tuple[float, ...] = ()  # "factors" only; divisors of the head_dim / 2 frequencies


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and variants of a decoder. Norm weights are ready to multiply: Gemma's +1 is added when they are loaded."""

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
    local_rope_theta: float | None = None  # theta of layers with a window (Gemma 3); never scaled
    windows: tuple[int, ...] = ()  # sliding window of each layer, in positions; 0: none; (): no layer has one
    attention_scale: float | None = None  # None: head_dim ** -0.5
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False  # further norms after attention and after the MLP (Gemma 3)
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embedding_scale: float = 1.0
    tied_head: bool = False
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    mask_token: int | None = None  # token of drafted positions in a model that drafts in one pass (PARD)

    def checked(self, source: str) -> ModelConfig:
        """Return the config itself, or raise if its numbers contradict each other. Parsers check each number alone."""
        problem = _problem(self)
        if problem:
            raise ModelFileError(f"{source}: {problem}")
        return self

    def leading(self, layers: int) -> ModelConfig:
        """Return the config of this model's first `layers` layers, with its embedding and output layer."""
        assert 1 <= layers <= self.num_layers, f"{layers} of {self.num_layers} layers"
        return replace(self, num_layers=layers, windows=self.windows[:layers])

    @property
    def even_context(self) -> float:
        """Context, in positions, at which attention of a row needs as many operations as its products."""
        heads, hidden = self.num_heads * self.head_dim, self.hidden_size
        projections = hidden * (2 * heads + 2 * self.num_kv_heads * self.head_dim)
        return (projections + 3 * hidden * self.intermediate_size) / (2 * heads)


def has_window(layer: int, period: int) -> bool:
    """Whether a layer has a sliding window in a model where every `period`-th layer has none."""
    return (layer + 1) % period != 0


def _problem(config: ModelConfig) -> str | None:
    if config.num_heads % config.num_kv_heads:
        return f"{config.num_heads} attention heads are not a multiple of {config.num_kv_heads} key/value heads"
    if config.head_dim % 2:
        return f"head dimension {config.head_dim} is odd; rotary embeddings need pairs"
    if len(config.windows) not in (0, config.num_layers):
        return f"windows of {len(config.windows)} layers where the model has {config.num_layers}"
    scaling = config.rope_scaling
    if scaling and scaling.kind == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
        return (
            f"rope high_freq_factor {scaling.high_freq_factor} is not above low_freq_factor {scaling.low_freq_factor}"
        )
    if scaling and scaling.kind == "factors" and len(scaling.factors) != config.head_dim // 2:
        return f"{len(scaling.factors)} rope factors where head_dim / 2 = {config.head_dim // 2} are needed"
    outside = [token for token in (*config.eos_ids, config.bos_id or 0) if not 0 <= token < config.vocab_size]
    if outside:
        return f"special token {outside[0]} is outside of the vocabulary of {config.vocab_size}"
    return None
