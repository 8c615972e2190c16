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
from paceline.models.heads import EagleConfig, EagleHead, MedusaHead

PUBLISHED = {
    "fc": "fc.weight",
    "embed_norm": "midlayer.input_layernorm.weight",
    "hidden_norm": "midlayer.hidden_norm.weight",
    "mlp_norm": "midlayer.post_attention_layernorm.weight",
    "norm": "norm.weight",
    "head": "lm_head.weight",
    "embed": "embed_tokens.weight",
    **{name: f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"},
    **{name: f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
}


def random_eagle(
    target: ModelConfig,
    *,
    taps: tuple[int, int, int] = (0, 1, 1),
    draft_vocab: int | None = None,
    hidden: int | None = None,
    norm_first: bool = False,
    seed: int = 0,
) -> EagleHead:
    """With a `hidden` size of its own it has an embedding of its own."""
    generator = torch.Generator().manual_seed(seed)
    layer = replace(target, num_layers=1, hidden_size=hidden or target.hidden_size, windows=(), tied_head=False)
    size = draft_vocab or target.vocab_size
    shapes = eagle_shapes(layer, target_hidden=target.hidden_size, draft_vocab=size)
    if hidden is not None:
        shapes["embed"] = (target.vocab_size, hidden)
    weights: dict[str, Weight] = {
        name: 1 + 0.1 * torch.randn(shape, generator=generator)
        if len(shape) == 1
        else 0.13 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }
    ids = torch.randperm(target.vocab_size, generator=generator)[:size].sort().values.to(torch.int32)
    config = EagleConfig(
        layer=layer,
        draft_vocab_size=size,
        target_hidden_size=target.hidden_size,
        taps=taps,
        norm_first=norm_first,
    )
    return EagleHead(config=config, weights=weights, ids=ids)


def eagle_shapes(layer: ModelConfig, *, target_hidden: int, draft_vocab: int) -> dict[str, tuple[int, ...]]:
    hidden, middle = layer.hidden_size, layer.intermediate_size
    queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    return {
        "fc": (hidden, 3 * target_hidden),
        **dict.fromkeys(("embed_norm", "hidden_norm", "mlp_norm", "norm"), (hidden,)),
        "q": (queries, 2 * hidden),
        "k": (keys, 2 * hidden),
        "v": (keys, 2 * hidden),
        "o": (hidden, queries),
        "gate": (middle, hidden),
        "up": (middle, hidden),
        "down": (hidden, middle),
        "head": (draft_vocab, hidden),
    }


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
    config, layer = head.config, head.config.layer
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
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
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(config.taps)},
    }


def eagle_tensors(head: EagleHead) -> dict[str, Tensor]:
    """As in its model.safetensors."""
    chosen = torch.zeros(head.config.layer.vocab_size, dtype=torch.bool)
    chosen[head.ids.long()] = True
    weights = {PUBLISHED[name]: weight for name, weight in head.weights.items() if isinstance(weight, Tensor)}
    return {**weights, "d2t": head.ids.long() - torch.arange(len(head.ids)), "t2d": chosen}


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
