"""Read a ModelConfig from a Hugging Face config.json; `FAMILIES` has one row for each architecture.

Rotary parameters are read in both spellings: `rope_theta` with `rope_scaling`, and the newer `rope_parameters`.
A feature that the decoder lacks raises UnsupportedModel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from paceline.errors import UnsupportedModel
from paceline.models.config import GEMMA_WINDOW_PERIOD, ModelConfig, RopeScaling, has_window
from paceline.models.fields import Fields
from paceline.models.refusals import ANOTHER_ENGINE, unknown_architecture

REFUSED = {  # fields that ask for arithmetic the decoder lacks, unless they are null, 0 or false
    "attn_logit_softcapping": "attention soft-capping",
    "final_logit_softcapping": "logit soft-capping",
    "use_bidirectional_attention": "attention to later tokens",
    "num_local_experts": "mixture of experts",
    "num_experts": "mixture of experts",
    "alibi": "ALiBi",
}
PARALLEL = ("pard_token", "ptd_token_id")  # names of the token of drafted positions, in a PARD model
QUANTISED = ("quantization_config", "compression_config")  # the second: of older compressed-tensors
ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class Family:
    """Facts of an architecture that its config.json does not state."""

    architecture: str
    model_type: str
    qkv_bias: bool = False  # q, k and v always have a bias
    optional_bias: bool = True  # `attention_bias` in config.json gives q, k, v and o a bias
    window: Literal["none", "all", "some", "pattern"] = "none"  # which layers have a sliding window
    qk_norm: bool = False
    gemma: bool = False
    activation: str = "silu"
    head_dim: int | None = None  # default if config.json has none; None: hidden size / heads
    default_window: int | None = None  # positions; default if config.json has none


FAMILIES = {
    "LlamaForCausalLM": Family("llama", "llama"),
    "MistralForCausalLM": Family("mistral", "mistral", optional_bias=False, window="all", default_window=4096),
    "Qwen2ForCausalLM": Family("qwen2", "qwen2", qkv_bias=True, optional_bias=False, window="some"),
    "MiMoForCausalLM": Family("qwen2", "mimo", qkv_bias=True, optional_bias=False, window="some"),
    "Qwen3ForCausalLM": Family("qwen3", "qwen3", window="some", qk_norm=True, head_dim=128),
    "Gemma3ForCausalLM": Family(
        "gemma3",
        "gemma3_text",
        window="pattern",
        qk_norm=True,
        gemma=True,
        activation="gelu_pytorch_tanh",
        head_dim=256,
        default_window=4096,
    ),
}


def config_from_hf(values: Mapping[str, Any], *, source: str) -> ModelConfig:
    fields = Fields(values, source=source)
    family = _family(fields)
    _refuse(fields)
    vocab = fields.integer("vocab_size", high=1 << 24)
    hidden = fields.integer("hidden_size", high=1 << 17)
    heads = fields.integer("num_attention_heads", high=4096)
    layers = fields.integer("num_hidden_layers", high=1024)
    head_dim = fields.integer("head_dim", family.head_dim or max(1, hidden // heads), high=1024)
    windows = _windows(fields, family, layers)
    theta, scaling, local_theta = _rope(fields, family)
    bias = family.optional_bias and fields.flag("attention_bias", False)
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", high=1 << 20),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads, high=4096),
        head_dim=head_dim,
        max_context=fields.integer("max_position_embeddings", high=1 << 24),
        norm_eps=fields.number("rms_norm_eps", 1e-6, low=0.0, high=1.0),
        rope_theta=theta,
        rope_scaling=scaling,
        local_rope_theta=local_theta,
        windows=windows,
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5 if family.gemma else None,
        qkv_bias=family.qkv_bias or bias,
        output_bias=bias,
        mlp_bias=family.architecture == "llama" and fields.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        post_norms=family.gemma,
        activation=_activation(fields, family),
        embedding_scale=hidden**0.5 if family.gemma else 1.0,
        tied_head=fields.flag("tie_word_embeddings", family.gemma),
        eos_ids=token_ids(fields, "eos_token_id"),
        bos_id=next(iter(token_ids(fields, "bos_token_id")), None),
        mask_token=_mask_token(fields, vocab),
    ).checked(source)


def token_ids(fields: Fields, key: str) -> tuple[int, ...]:
    """Read a field that has one token id, a list of them, or none."""
    value = fields.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and 0 <= token < 1 << 31 for token in ids):
        raise fields.error(key, f"is {value!r:.100}; allowed: a token id or a list of them")
    return tuple(dict.fromkeys(ids))


def _mask_token(fields: Fields, vocab: int) -> int | None:
    key = next((key for key in PARALLEL if fields.get(key) is not None), None)
    return None if key is None else fields.integer(key, low=0, high=vocab - 1)


def _family(fields: Fields) -> Family:
    names = fields.get("architectures") or []
    by_type = {family.model_type: name for name, family in FAMILIES.items()}
    model_type = fields.get("model_type")
    name = names[0] if isinstance(names, list) and names else by_type.get(str(model_type), model_type)
    family = FAMILIES.get(str(name))
    if family is None:
        raise unknown_architecture(fields.source, name)
    return family


def _refuse(fields: Fields) -> None:
    for key in QUANTISED:
        if fields.get(key):
            method = fields.inner(key).get("quant_method") or "an unnamed method"
            raise UnsupportedModel(
                f"{fields.source}: weights quantised for another engine by {method!s:.50} ({key}); {ANOTHER_ENGINE}"
            )
    for key, feature in REFUSED.items():
        if fields.get(key):
            raise UnsupportedModel(f"{fields.source}: uses {feature} ({key}), which Paceline does not know")
    if fields.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UnsupportedModel(f"{fields.source}: rotates only a part of each head (partial_rotary_factor)")


def _activation(fields: Fields, family: Family) -> Literal["silu", "gelu_tanh"]:
    name = fields.text("hidden_activation" if family.gemma else "hidden_act", family.activation)
    if name not in ACTIVATIONS:
        raise UnsupportedModel(f"{fields.source}: activation {name!r:.100}; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _windows(fields: Fields, family: Family, layers: int) -> tuple[int, ...]:
    if family.window == "none" or (family.window == "some" and not fields.flag("use_sliding_window", False)):
        return ()
    absent = fields.get("sliding_window") is None and "sliding_window" in fields.values
    window = 0 if absent else fields.integer("sliding_window", family.default_window, low=0)
    types = fields.get("layer_types")
    if types is None:
        local = [_is_local(fields, family, index) for index in range(layers)]
    elif isinstance(types, list) and all(kind in ("sliding_attention", "full_attention") for kind in types):
        local = [kind == "sliding_attention" for kind in types]
    else:
        raise UnsupportedModel(f"{fields.source}: layer_types other than sliding_attention and full_attention")
    if family.window == "all" and not all(local):
        raise UnsupportedModel(f"{fields.source}: a {family.architecture} model that mixes layer_types")
    windows = tuple(window if flag else 0 for flag in local)
    return windows if any(windows) or len(windows) != layers else ()


def _is_local(fields: Fields, family: Family, index: int) -> bool:
    if family.window == "pattern":
        return has_window(index, fields.integer("sliding_window_pattern", GEMMA_WINDOW_PERIOD))
    return family.window == "all" or index >= fields.integer("max_window_layers", 28, low=0)


def _rope(fields: Fields, family: Family) -> tuple[float, RopeScaling | None, float | None]:
    """Read theta, its scaling, and a separate theta for layers with a window (None: they use the first)."""
    default = 1_000_000.0 if family.gemma else 10_000.0
    parameters = fields.inner("rope_parameters")
    old = fields.inner("rope_scaling")
    whole = parameters.inner("full_attention") if "full_attention" in parameters.values else parameters
    theta = whole.number("rope_theta", fields.number("rope_theta", default))
    scaling = _rope_scaling(whole if whole.values else old)
    if not family.gemma:
        return theta, scaling, None
    local = parameters.inner("sliding_attention")
    if _rope_scaling(local) is not None:
        raise UnsupportedModel(f"{fields.source}: rope scaling in layers with a sliding window")
    return theta, scaling, local.number("rope_theta", fields.number("rope_local_base_freq", 10_000.0))


def _rope_scaling(fields: Fields) -> RopeScaling | None:
    kind = fields.text("rope_type", fields.text("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=fields.number("factor"))
    if kind != "llama3":
        raise UnsupportedModel(f"{fields.source}: rope type {kind!r:.50}; supported: default, linear, llama3")
    return RopeScaling(
        kind="llama3",
        factor=fields.number("factor"),
        low_freq_factor=fields.number("low_freq_factor"),
        high_freq_factor=fields.number("high_freq_factor"),
        original_context=fields.integer("original_max_position_embeddings"),
    )
