"""Models of a few kilobytes for audits: one that says something, one that nearly says the same, and one that loops."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.cli.tiny_model import LAYERS, write_model

CYCLE = 5  # tokens of the loop
SHARPNESS, ECHO, NOISE = 5.0, 2.0, 0.15  # an echo: what was said is likely to be said again, if nothing forbids it


def write_pair(target: Path, drafter: Path) -> None:
    """A target that knows what it wants to say, and the same model with some noise on its weights."""
    write_model(target)
    write_model(drafter, seed=1)
    own, other = (load_file(path / "model.safetensors") for path in (target, drafter))
    for weights in (own, other):
        weights["lm_head.weight"] = SHARPNESS * weights["lm_head.weight"] + ECHO * own["model.embed_tokens.weight"]
    mixed = {name: weight + (NOISE * other[name] if weight.dim() > 1 else 0) for name, weight in own.items()}
    save_file(own, target / "model.safetensors")
    save_file(mixed, drafter / "model.safetensors")


def write_looping(path: Path) -> None:
    """What a lookup drafter likes best: each token is followed by the next of five, whatever came before."""
    write_model(path)
    weights = load_file(path / "model.safetensors")
    for layer in range(LAYERS):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            weights[f"model.layers.{layer}.{name}.weight"].zero_()
    embed = torch.randn(weights["model.embed_tokens.weight"].shape, generator=torch.Generator().manual_seed(5))
    head = torch.zeros_like(embed)
    for token in range(len(embed)):
        head[100 + (token + 1) % CYCLE] += embed[token] if token >= 100 and token < 100 + CYCLE else 0.1 * embed[token]
    weights["model.embed_tokens.weight"], weights["lm_head.weight"] = embed, head
    save_file(weights, path / "model.safetensors")
