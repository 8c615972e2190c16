"""Heads with random weights, in memory and as the directories that are published."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.kernels.quant import Weight
from paceline.models.config import ModelConfig
from paceline.models.eagle_config import EagleConfig, Kind
from paceline.models.heads import EagleHead, MedusaHead

LAYER = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    **{f"{name}_norm": f"self_attn.{name}_norm" for name in "qk"},
    **{name: f"self_attn.{name}_proj" for name in "qkvo"},
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
PUBLISHED = {"embed_norm": "layers.0.input_layernorm", "head": "lm_head", "embed": "embed_tokens"}


def random_eagle(
    target: ModelConfig,
    *,
    taps: tuple[int, ...] = (0, 1, 1),
    draft_vocab: int | None = None,
    hidden: int | None = None,
    norm_first: bool = False,
    layers: int = 1,
    feature_norms: int = 0,
    norm_output: bool = False,
    window: int = 0,
    kind: Kind = "EAGLE-3",
    mask_token: int | None = None,
    without: tuple[str, ...] = (),
    seed: int = 0,
    **variants: bool,
) -> EagleHead:
    """With a `hidden` size of its own it has an embedding of its own. `variants`: fields of its layers' config, such as
    `qk_norm`. `without`: weights that it takes from the target."""
    generator = torch.Generator().manual_seed(seed)
    windows = (window,) * layers if window else ()
    sizes = {"num_layers": layers, "hidden_size": hidden or target.hidden_size, "windows": windows, "tied_head": False}
    size = draft_vocab or target.vocab_size
    config = EagleConfig(
        decoder=replace(target, **{**sizes, **variants}),
        draft_vocab_size=size,
        target_hidden_size=target.hidden_size,
        taps=taps,
        kind=kind,
        norm_first=norm_first,
        feature_norms=feature_norms,
        norm_output=norm_output,
        mask_token=mask_token,
    )
    shapes = eagle_shapes(config)
    if hidden is not None or mask_token is not None:
        shapes["embed"] = (target.vocab_size, config.decoder.hidden_size)
    weights: dict[str, Weight] = {
        name: (1 if name.endswith("norm") else 0)
        + (0.1 if len(shape) == 1 else 0.13) * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
        if name not in without
    }
    ids = torch.randperm(target.vocab_size, generator=generator)[:size].sort().values.to(torch.int32)
    return EagleHead(config=config, weights=weights, ids=ids)


def eagle_shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    decoder, hidden, pairs = config.decoder, config.decoder.hidden_size, config.fuses_tokens
    shapes: dict[str, tuple[int, ...]] = {"fc": (hidden, config.fc_inputs)}
    if config.state_norm is not None:
        shapes |= dict.fromkeys(("embed_norm", "layers.0.attn_norm", config.state_norm), (hidden,))
    for index in range(decoder.num_layers):
        wide = index == 0 and not pairs
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer_shapes(decoder, wide=wide).items()}
        if index:
            shapes[f"layers.{index}.attn_norm"] = (hidden,)
    if config.state_norm is not None:
        shapes["norm"] = (hidden,)
    if config.feature_norms:
        shapes["fc_norm"] = (config.width,)
    if config.mask_token is not None:
        shapes["mask"] = (config.width,)
    return shapes | {"head": (config.draft_vocab_size, hidden)}


def layer_shapes(layer: ModelConfig, *, wide: bool) -> dict[str, tuple[int, ...]]:
    hidden, middle = layer.hidden_size, layer.intermediate_size
    queries, keys, inputs = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim, (1 + wide) * hidden
    shapes: dict[str, tuple[int, ...]] = {
        "mlp_norm": (hidden,),
        "q": (queries, inputs),
        "k": (keys, inputs),
        "v": (keys, inputs),
        "o": (hidden, queries),
        "gate": (middle, hidden),
        "up": (middle, hidden),
        "down": (hidden, middle),
    }
    if layer.qk_norm:
        shapes |= dict.fromkeys(("q_norm", "k_norm"), (layer.head_dim,))
    if layer.qkv_bias:
        shapes |= {"q.bias": (queries,), "k.bias": (keys,), "v.bias": (keys,)}
    return shapes


def random_medusa(target: ModelConfig, *, heads: int = 3, layers: int = 1, seed: int = 0) -> list[MedusaHead]:
    generator = torch.Generator().manual_seed(seed)
    hidden = target.hidden_size

    def draw(*shape: int) -> Tensor:
        return 0.13 * torch.randn(shape, generator=generator)

    return [
        MedusaHead(
            blocks=tuple((draw(hidden, hidden), draw(hidden)) for _ in range(layers)),
            head=3 * draw(target.vocab_size, hidden),
        )
        for _ in range(heads)
    ]


def eagle_values(head: EagleHead) -> dict[str, Any]:
    """As in its config.json."""
    config, layer = head.config, head.config.decoder
    parallel = {"parallel_drafting": True, "mask_token_id": config.mask_token} if config.mask_token is not None else {}
    layers = {"num_hidden_layers": layer.num_layers} if layer.num_layers > 1 else {}
    windows = {"layer_types": ["sliding_attention"] * layer.num_layers, "sliding_window": max(layer.windows, default=0)}
    return {
        "architectures": ["EagleLlamaForCausalLM" if config.fuses_tokens else "LlamaForCausalLMEagle3"],
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "rms_norm_eps": layer.norm_eps,
        "rope_theta": layer.rope_theta,
        "vocab_size": layer.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "max_position_embeddings": layer.max_context,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_first,
        "norm_output": config.norm_output,
        "norm_before_fc": config.feature_norms == 1,
        "fc_norm": config.feature_norms > 1,
        "attention_bias": layer.qkv_bias,
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
        **parallel,
        **layers,
        **(windows if layer.windows else {}),
    }


def eagle_tensors(head: EagleHead) -> dict[str, Tensor]:
    """As in its model.safetensors, with the first layer under the name of a single one."""
    chosen = torch.zeros(head.config.decoder.vocab_size, dtype=torch.bool)
    chosen[head.ids.long()] = True
    tensors: dict[str, Tensor] = {}
    for name, weight in head.weights.items():
        assert isinstance(weight, Tensor)
        tensors |= _published(head.config, name, weight)
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    return {**tensors, "d2t": head.ids.long() - torch.arange(len(head.ids)), "t2d": chosen}


def _published(config: EagleConfig, name: str, weight: Tensor) -> dict[str, Tensor]:
    if name == "mask":
        return {"mask_hidden": weight[None, None]}
    if name == "fc_norm":
        parts = weight.chunk(config.feature_norms)
        return (
            {"input_norm.weight": weight}
            if len(parts) == 1
            else {f"fc_norm.{i}.weight": part for i, part in enumerate(parts)}
        )
    whole, kind = name.removesuffix(".bias"), "bias" if name.endswith(".bias") else "weight"
    if whole == "layers.0.attn_norm":
        return {"layers.0.hidden_norm.weight": weight}
    prefix, _, last = whole.rpartition(".")
    full = f"{prefix}.{LAYER[last]}" if prefix else PUBLISHED.get(whole, whole)
    return {f"{full}.{kind}": weight}


def medusa_tensors(heads: list[MedusaHead]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for i, head in enumerate(heads):
        for j, (weight, bias) in enumerate(head.blocks):
            assert isinstance(weight, Tensor)
            tensors |= {f"{i}.{j}.linear.weight": weight, f"{i}.{j}.linear.bias": bias}
        assert isinstance(head.head, Tensor)
        tensors[f"{i}.{len(head.blocks)}.weight"] = head.head
    return tensors


def write_head(directory: Path, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(values))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(directory / "model.safetensors"))
    return directory
