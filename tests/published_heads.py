"""Heads in each layout in which they are published, with random weights: config.json and tensors by published names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.cli.tiny_model import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, MLP
from tests.heads import write_head

DRAFT = 60  # tokens of a draft vocabulary
IDS = "eagle_aux_hidden_state_layer_ids"
SHAPE = {
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
}


@dataclass(frozen=True)
class Layout:
    """One way to publish a head."""

    values: Mapping[str, Any]
    shape: Mapping[str, Any] = field(default_factory=dict)  # of its layers
    nested: str | None = None  # key under which the config of the layers stands; None: at the top
    taps: int = 3
    prefix: str = "midlayer."  # of the first layer's tensors
    fused: bool = False  # EAGLE-1
    fc: str = "fc"
    own_output: bool = True
    own_embedding: bool = False

    def write(self, folder: Path, *, vocab: int, seed: int = 0) -> Path:
        inner = {**SHAPE, "vocab_size": vocab, **self.shape}
        values = {**self.values, self.nested: inner} if self.nested else {**inner, **self.values}
        return write_head(folder, values, self.tensors(inner, vocab, torch.Generator().manual_seed(seed)))

    def tensors(self, shape: Mapping[str, Any], vocab: int, random: torch.Generator) -> dict[str, Tensor]:
        def draw(*size: int) -> Tensor:
            return (1 if len(size) == 1 else 0) + 0.13 * torch.randn(size, generator=random)

        width = self.taps * HIDDEN
        tensors = {f"{self.fc}.weight": draw(HIDDEN, 2 * HIDDEN if self.fused else width)}
        for index in range(shape["num_hidden_layers"]):
            prefix = self.prefix if index == 0 else f"layers.{index}."
            inputs = 2 * HIDDEN if index == 0 and not self.fused else HIDDEN
            tensors |= {f"{prefix}{name}": draw(*size) for name, size in _layer(shape, inputs).items()}
            if index or not self.fused:
                tensors[f"{prefix}input_layernorm.weight"] = draw(HIDDEN)
        if not self.fused:
            tensors |= {f"{self.prefix}hidden_norm.weight": draw(HIDDEN), "norm.weight": draw(HIDDEN)}
        if self.values.get("norm_before_fc"):
            tensors["input_norm.weight"] = draw(width)
        if self.values.get("fc_norm"):
            tensors |= {f"fc_norm.{i}.weight": draw(HIDDEN) for i in range(self.taps)}
        if self.values.get("fusion_bias") or self.values.get("bias"):
            tensors[f"{self.fc}.bias"] = draw(HIDDEN) - 1
        if "mask_token_id" in self.values:
            tensors["mask_hidden"] = draw(1, 1, width)
        if self.own_embedding:
            tensors["embed_tokens.weight"] = draw(vocab, HIDDEN)
        return tensors | self._outputs(vocab, random)

    def _outputs(self, vocab: int, random: torch.Generator) -> dict[str, Tensor]:
        if not self.own_output:
            return {}
        size = self.values.get("draft_vocab_size") or vocab
        output = {"lm_head.weight": 0.3 * torch.randn((size, HIDDEN), generator=random)}
        if size == vocab:
            return output
        ids = torch.randperm(vocab, generator=random)[:size].sort().values
        chosen = torch.zeros(vocab, dtype=torch.bool)
        chosen[ids] = True
        return output | {"d2t": ids - torch.arange(size), "t2d": chosen}


def _layer(shape: Mapping[str, Any], inputs: int) -> dict[str, tuple[int, ...]]:
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    sizes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (queries, inputs),
        "self_attn.k_proj.weight": (keys, inputs),
        "self_attn.v_proj.weight": (keys, inputs),
        "self_attn.o_proj.weight": (HIDDEN, queries),
        "post_attention_layernorm.weight": (HIDDEN,),
        "mlp.gate_proj.weight": (MLP, HIDDEN),
        "mlp.up_proj.weight": (MLP, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, MLP),
    }
    if shape.get("attention_bias"):
        sizes |= {
            f"self_attn.{name}_proj.bias": (size,) for name, size in zip("qkv", (queries, keys, keys), strict=True)
        }
    if shape.get("model_type") == "qwen3":
        sizes |= dict.fromkeys(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), (HEAD_DIM,))
    return sizes


EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_config": {"algorithm": "eagle3", "proposal_methods": [{"speculative_tokens": 3}]},
    "draft_vocab_size": DRAFT,
    "target_hidden_size": None,
    IDS: [0, 1, 2],
}
NESTED, QWEN3 = "transformer_layer_config", {"model_type": "qwen3", "layer_types": ["full_attention"]}
LAYOUTS: Mapping[str, Layout] = {
    "eagle3": Layout({**EAGLE3, IDS: [0, 1, 2]}),
    "eagle3, outputs of layers": Layout(
        {**EAGLE3, "eagle_config": {IDS: [-1, 0, 1], "use_aux_hidden_state": True}, "torch_dtype": "bfloat16"}
    ),
    "eagle3.1": Layout({**EAGLE3, IDS: [0, 1, 2], "fc_norm": True, "norm_output": True}, own_embedding=True),
    "eagle3, one norm before fc": Layout({**EAGLE3, IDS: [2, 1], "norm_before_fc": True}, taps=2),
    "eagle3, biases and a window": Layout(
        {**EAGLE3, IDS: [1]},
        {"attention_bias": True, "layer_types": ["sliding_attention"], "sliding_window": 5},
        taps=1,
    ),
    "speculators": Layout(SPECULATORS, nested=NESTED, prefix="layers.0."),
    "speculators, qwen3": Layout({**SPECULATORS, "norm_before_residual": False}, QWEN3, NESTED, prefix="layers.0."),
    "speculators, three layers": Layout(
        {**SPECULATORS, "norm_output": True},
        {"num_hidden_layers": 3, "model_type": "qwen3", "layer_types": ["sliding_attention"] * 3, "sliding_window": 6},
        NESTED,
        prefix="layers.0.",
    ),
    "whole vocabulary": Layout({**EAGLE3, "draft_vocab_size": None, IDS: [0, 1, 2]}, own_output=False),
    "p-eagle": Layout(
        {**SPECULATORS, "architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle", "mask_token_id": 7},
        {"num_hidden_layers": 2, "model_type": "qwen3"},
        NESTED,
        prefix="layers.0.",
        own_embedding=True,
    ),
    "p-eagle of one layer": Layout(
        {**EAGLE3, "architectures": ["PEagleDraftModel"], "mask_token_id": 3, IDS: [0, 1, 2], "fc_norm": True}
    ),
    "eagle1": Layout(
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "bias": True},
        prefix="layers.0.",
        fused=True,
        own_output=False,
        own_embedding=True,
    ),
    "eagle1, vllm": Layout(
        {"architectures": ["EagleLlamaForCausalLM"], "model_type": "eagle"},
        nested="model",
        prefix="model.layers.0.",
        fused=True,
        own_output=False,
    ),
    "eagle1, speculators": Layout(
        {"architectures": ["EagleSpeculator"], "speculators_model_type": "eagle", "fusion_bias": True},
        nested=NESTED,
        prefix="transformer.",
        fused=True,
        fc="fusion_fc",
        own_output=False,
    ),
}
