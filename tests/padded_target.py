"""A tiny target whose embedding has more rows than its tokenizer has tokens, as published models do."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.cli.tiny_model import HIDDEN, write_model

PADDING = 13  # rows behind the tokens


def write_padded(folder: Path) -> tuple[Path, int]:
    """Write a target; return it, and the number of its tokens."""
    write_model(folder)
    config = json.loads((folder / "config.json").read_text())
    tokens = config["vocab_size"]
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": tokens + PADDING}))
    tensors = load_file(folder / "model.safetensors")
    random = torch.Generator().manual_seed(9)
    more = {"model.embed_tokens.weight": torch.randn((PADDING, HIDDEN), generator=random)}
    more["lm_head.weight"] = torch.zeros((PADDING, HIDDEN))
    tensors |= {name: torch.cat([tensors[name], rows]) for name, rows in more.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder, tokens
