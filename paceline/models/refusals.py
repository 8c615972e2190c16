"""Refusals by name: what a model has that Paceline does not read, and what is near that it does.

A file that would be ignored silently could change what the model says, so its presence alone is refused.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from paceline.errors import UnsupportedModel
from paceline.models.config import SUPPORTED

ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
# Files beside old quantised weights, whose config.json says nothing → the method
QUANTISED = {"quantize_config.json": "GPTQ", "quant_config.json": "AWQ", "hf_quant_config.json": "ModelOpt"}
ANOTHER_ENGINE = "take the original weights or a GGUF file, and choose --format"
# Root of an architecture's name → architectures of the family that are read
FAMILIES = {
    "llama": ["llama"],
    "smollm": ["smollm2"],
    "mistral": ["mistral"],
    "ministral": ["mistral"],
    "mixtral": ["mistral"],
    "qwen": ["qwen2", "qwen3"],
    "gemma": ["gemma3"],
}
EXPERTS = re.compile(r"moe|mixtral|next")
SENSES = re.compile(r"vl|conditional|omni|audio|vision|3n")


def refuse_files(directory: Path) -> None:
    """Raise UnsupportedModel for a directory with a LoRA adapter, or with weights quantised for another engine."""
    for name in ADAPTERS:
        if (directory / name).exists():
            raise UnsupportedModel(
                f"{directory}: holds a LoRA adapter ({name}), which Paceline does not read; merge it into its model "
                "(in peft: `merge_and_unload`), or move it away to run the model without it"
            )
    for name, method in QUANTISED.items():
        if (directory / name).exists():
            raise UnsupportedModel(
                f"{directory}: weights quantised by {method} ({name}), which Paceline does not read; {ANOTHER_ENGINE}"
            )


def unknown_architecture(source: str, name: object) -> UnsupportedModel:
    near = _near(str(name).lower())
    hint = f"near: {near}; " if near else ""
    return UnsupportedModel(f"{source}: architecture {name!r:.100} is not read; {hint}supported: {SUPPORTED}")


def _near(name: str) -> str | None:
    """The architecture that is read and nearest to one that is not; None if its family is unknown."""
    root = re.match(r"[a-z]*", name)
    family = [read for known, read in FAMILIES.items() if root is not None and root[0].startswith(known)]
    if not family:
        return None
    [nearest] = difflib.get_close_matches(name[:6], family[0], n=1, cutoff=0.0)
    kind = " (dense)" if EXPERTS.search(name) else " (text)" if SENSES.search(name) else ""
    return nearest + kind
