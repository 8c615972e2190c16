"""Read a ModelConfig from the metadata of a GGUF file.

The list of tensors supplies what the metadata leaves out: biases, a tied head, the vocabulary's size, Llama 3's rotary
factors. A feature that the decoder lacks raises UnsupportedModel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from paceline.errors import UnsupportedModel
from paceline.models.config import GEMMA_WINDOW_PERIOD, ModelConfig, RopeScaling, has_window
from paceline.models.fields import Fields
from paceline.models.gguf import GgufFile
from paceline.models.refusals import unknown_architecture

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
REFUSED = {  # metadata that asks for arithmetic the decoder lacks, unless it is 0
    "expert_count": "mixture of experts",
    "attn_logit_softcapping": "attention soft-capping",
    "final_logit_softcapping": "logit soft-capping",
    "attention.max_alibi_bias": "ALiBi",
    "attention.clamp_kqv": "clamped attention",
    "logit_scale": "scaled logits",
    "residual_scale": "scaled residuals",
    "embedding_scale": "scaled embeddings",
    "attention.shared_kv_layers": "shared key/value layers",
    "attention.temperature_scale": "attention temperature",
    "attention.output_scale": "scaled attention outputs",
}
ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
CONTROL = 3  # GGUF's token type of control tokens


def config_from_gguf(file: GgufFile) -> ModelConfig:
    general = Fields(file.metadata, source=file.label)
    _refuse_type(general)
    architecture = general.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise unknown_architecture(file.label, architecture)
    fields = Fields(file.metadata, source=file.label, prefix=f"{architecture}.")
    _refuse(file, fields)
    hidden = fields.integer("embedding_length", high=1 << 17)
    heads = fields.integer("attention.head_count", high=4096)
    layers = fields.integer("block_count", high=1024)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=_vocab_size(file),
        hidden_size=hidden,
        intermediate_size=fields.integer("feed_forward_length", high=1 << 20),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.integer("attention.head_count_kv", heads, high=4096),
        head_dim=fields.integer("attention.key_length", max(1, hidden // heads), high=1024),
        max_context=fields.integer("context_length", high=1 << 24),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon", low=0.0, high=1.0),
        rope_theta=fields.number("rope.freq_base", 10_000.0),
        rope_scaling=_rope_scaling(file, fields),
        windows=_windows(fields, architecture, layers),
        attention_scale=fields.number("attention.scale", 0.0, low=0.0) or None,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        tied_head="output.weight" not in file.tensors,
        eos_ids=tuple(dict.fromkeys(_ends(general))),
        bos_id=_bos(general),
    )
    if architecture == "gemma3":
        config = _gemma(config, fields)
    _check_heads(config, fields)
    return config.checked(file.label)


def _gemma(config: ModelConfig, fields: Fields) -> ModelConfig:
    # the 27B model (62 layers) scales attention by hidden size / heads, not by head_dim; no key says so
    width = config.hidden_size // config.num_heads if config.num_layers == 62 else config.head_dim
    return replace(
        config,
        local_rope_theta=fields.number("rope.freq_base_swa", 10_000.0),
        rope_theta=fields.number("rope.freq_base", 1_000_000.0),
        attention_scale=config.attention_scale or width**-0.5,
        embedding_scale=config.hidden_size**0.5,
        activation="gelu_tanh",
        post_norms=True,
    )


def _refuse_type(general: Fields) -> None:
    """Raise UnsupportedModel for a file that is something else than a model."""
    kind = general.text("general.type", "model")
    if kind == "adapter":
        raise UnsupportedModel(
            f"{general.source}: a LoRA adapter (general.type), which Paceline does not read; merge it into its model "
            "with `llama-export-lora`"
        )
    if kind != "model":
        raise UnsupportedModel(f"{general.source}: general.type is {kind!r:.50}, not a model that generates text")


def _refuse(file: GgufFile, fields: Fields) -> None:
    for key, feature in REFUSED.items():
        if fields.get(key):
            raise UnsupportedModel(f"{file.label}: uses {feature} ({fields.prefix}{key}), which Paceline does not know")
    if not fields.flag("attention.causal", True):
        raise UnsupportedModel(f"{file.label}: a model that attends to later tokens cannot generate text")
    if file.metadata.get("split.count", 0) not in (0, 1):
        raise UnsupportedModel(f"{file.label}: one part of a split model; join them with `llama-gguf-split --merge`")


def _check_heads(config: ModelConfig, fields: Fields) -> None:
    if fields.integer("attention.value_length", config.head_dim) != config.head_dim:
        raise UnsupportedModel(f"{fields.source}: keys and values of different widths, which Paceline does not know")
    rotated = fields.integer("rope.dimension_count", config.head_dim)
    if rotated != config.head_dim:
        raise UnsupportedModel(
            f"{fields.source}: rotates {rotated} of {config.head_dim} dimensions of a head; Paceline rotates all"
        )


def _vocab_size(file: GgufFile) -> int:
    info = file.tensors.get("token_embd.weight")
    if info is None or len(info.shape) != 2:
        raise Fields({}, source=file.label).error("token_embd.weight", "is missing or not a matrix")
    return info.shape[0]


def _rope_scaling(file: GgufFile, fields: Fields) -> RopeScaling | None:
    kind = fields.text("rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:
        factors = file.read_float("rope_freqs.weight", 0, 1).float().flatten()
        if kind != "none":
            raise UnsupportedModel(f"{file.label}: rope scaling {kind!r:.50} together with rope_freqs.weight")
        if not bool(((factors > 0) & factors.isfinite()).all()):
            raise fields.error("rope_freqs.weight", "holds factors that are not positive numbers")
        return RopeScaling(kind="factors", factors=tuple(factors.tolist()))
    if kind == "none":
        return None
    if kind != "linear":
        raise UnsupportedModel(f"{file.label}: rope scaling {kind!r:.50}; supported: linear and llama3")
    return RopeScaling(kind="linear", factor=fields.number("rope.scaling.factor"))


def _windows(fields: Fields, architecture: str, layers: int) -> tuple[int, ...]:
    window = fields.integer("attention.sliding_window", 0, low=0)
    if not window:
        return ()
    if architecture != "gemma3":
        return (window,) * layers
    pattern: Any = fields.get("attention.sliding_window_pattern") or GEMMA_WINDOW_PERIOD
    if isinstance(pattern, list):
        return tuple(window if local else 0 for local in pattern)
    period = fields.integer("attention.sliding_window_pattern", GEMMA_WINDOW_PERIOD)
    return tuple(window if has_window(index, period) else 0 for index in range(layers))


def _ends(general: Fields) -> Iterator[int]:
    """Yield the tokens that end a turn: those that the file names, and its control tokens that are in `ENDS`."""
    for key in ("eos", "eot", "eom"):
        token = general.integer(f"tokenizer.ggml.{key}_token_id", -1, low=-1)
        if token >= 0:
            yield token
    tokens, types = general.get("tokenizer.ggml.tokens"), general.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, list):
        pairs = enumerate(zip(tokens, types, strict=False))
        yield from (index for index, (token, kind) in pairs if kind == CONTROL and token in ENDS)


def _bos(general: Fields) -> int | None:
    token = general.integer("tokenizer.ggml.bos_token_id", -1, low=-1)
    return None if token < 0 else token
