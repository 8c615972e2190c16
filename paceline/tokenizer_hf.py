"""A tokenizer from a model directory: tokenizer.json, tokenizer_config.json, generation_config.json, chat template."""

from __future__ import annotations

from pathlib import Path

from paceline.vocab import TokenizerParts


def read_parts(path: Path) -> TokenizerParts:
    raise NotImplementedError
