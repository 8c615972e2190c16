"""Tiny random models of every family, saved as their authors would, and a way to run Paceline on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from paceline.models.load import load_model
from paceline.runner.forwards.torch import TorchForward
from tests.tiny_batches import chunks_of as chunks_of

PAGES = 8
COMMON = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4}),
    "llama3": ("Llama", {"rope_parameters": {"rope_theta": 500.0, **LLAMA3}}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_theta": 100.0, "rope_type": "linear", "factor": 2.0}}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "smollm2": ("Llama", {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}),
    "mistral": ("Mistral", {"sliding_window": 7, "head_dim": 32}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 32,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
}


def build_tiny(family: str) -> Any:
    """A transformers model in float32 whose every weight is random, also those that usually start at 0 or 1."""
    prefix, changes = FAMILIES[family]
    config_class = getattr(transformers, "Gemma3TextConfig" if prefix == "Gemma3" else f"{prefix}Config")
    config = config_class(**(COMMON | changes))
    torch.manual_seed(sum(map(ord, family)))
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.15))
    return model


def load_eager(path: Path, **options: Any) -> TorchForward:
    model = load_model(str(path), **options)
    return TorchForward(model.config, model.weights, num_pages=PAGES)


def run(forward: TorchForward, tokens: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    return torch.cat([forward(batch).logits for batch in chunks_of(tokens, sizes)])
