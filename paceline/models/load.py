"""Load a model by its name: config, weights, and the data from which its tokenizer is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from paceline.models.advice import NO_ADVICE, Advice, advice_of_directory, advice_of_gguf
from paceline.models.config import ModelConfig
from paceline.models.directory import member, read_json
from paceline.models.fields import Fields
from paceline.models.hf_config import config_from_hf, token_ids
from paceline.models.refusals import refuse_files
from paceline.models.resolve import name_of, resolve
from paceline.models.safetensors import SafetensorsFolder
from paceline.models.weights import Device, Format, Progress, TensorSource, Weight, load_weights


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model whose weights are not read yet."""

    kind: Literal["hf", "gguf"]
    path: Path  # directory or GGUF file
    config: ModelConfig
    source: TensorSource
    metadata: Mapping[str, Any]  # metadata of a GGUF file, with its tokenizer; empty for a directory
    generation: Advice  # sampling that the authors advise

    def loaded(self, weights: dict[str, Weight]) -> LoadedModel:
        return LoadedModel(
            kind=self.kind,
            path=self.path,
            config=self.config,
            weights=weights,
            metadata=self.metadata,
            generation=self.generation,
        )


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights, ready for a Forward. Its tokenizer is made from `path` or `metadata`."""

    kind: Literal["hf", "gguf"]
    path: Path
    config: ModelConfig
    weights: dict[str, Weight]
    metadata: Mapping[str, Any]
    generation: Advice = NO_ADVICE

    def leading(self, layers: int) -> LoadedModel:
        """Return the model of the first layers, with the embedding and the output layer; nothing is copied."""
        return replace(self, config=self.config.leading(layers), weights=leading_weights(self.weights, layers))


def leading_weights(weights: Mapping[str, Weight], layers: int) -> dict[str, Weight]:
    """Return the weights of the first layers, and those that belong to no layer."""
    return {name: weight for name, weight in weights.items() if layer_of(name) < layers}


def layer_of(name: str) -> int:
    """Return the layer of a weight; -1: it belongs to none."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "layers" else -1


def load_model(
    name: str, *, format: Format = "auto", device: Device = "cpu", progress: Progress | None = None
) -> LoadedModel:
    model = open_model(name, progress=progress)
    return model.loaded(load_weights(model.source, model.config, format=format, device=device, progress=progress))


def open_model(name: str, *, progress: Progress | None = None) -> OpenModel:
    """Open a model. `progress`: of one that is fetched first."""
    path = resolve(name, progress)
    return _open_directory(path) if path.is_dir() else _open_gguf(path)


def _open_gguf(path: Path) -> OpenModel:
    from paceline.models.gguf import GgufFile  # imported late: only GGUF files need the gguf package
    from paceline.models.gguf_config import config_from_gguf

    file = GgufFile(path)
    return OpenModel(
        kind="gguf",
        path=path,
        config=config_from_gguf(file),
        source=file,
        metadata=file.metadata,
        generation=advice_of_gguf(file.metadata, source=file.label, file_name=path.stem),
    )


def _open_directory(path: Path) -> OpenModel:
    refuse_files(path)
    config_path = member(path, "config.json")
    values = read_json(config_path)
    config, said = config_from_hf(values, source=str(config_path)), None
    if (path / "generation_config.json").exists():
        file = member(path, "generation_config.json")
        said = Fields(read_json(file), source=str(file))
        ends = token_ids(said, "eos_token_id")
        config = replace(config, eos_ids=ends or config.eos_ids).checked(str(file))
    return OpenModel(
        kind="hf",
        path=path,
        config=config,
        source=SafetensorsFolder(path),
        metadata={},
        generation=advice_of_directory(said, [name_of(path), values.get("_name_or_path")]),
    )
