"""What Paceline does not read is refused by its name, and the refusal says what is near."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.errors import UnsupportedModel
from paceline.models.load import open_model
from paceline.models.refusals import unknown_architecture
from tests.cli.tiny_model import write_model
from tests.models.broken import METADATA, build


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path)
    assert open_model(str(tmp_path)).kind == "hf"
    return tmp_path


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("adapter_config.json", r"LoRA adapter \(adapter_config.json\).*merge_and_unload.*move it away"),
        ("adapter_model.safetensors", r"LoRA adapter \(adapter_model.safetensors\)"),
        ("quantize_config.json", r"quantised by GPTQ \(quantize_config.json\).*a GGUF file"),
        ("quant_config.json", "quantised by AWQ"),
        ("hf_quant_config.json", "quantised by ModelOpt"),
    ],
)
def test_files_beside_a_model(model: Path, file: str, message: str) -> None:
    (model / file).write_text("{}")
    with pytest.raises(UnsupportedModel, match=message):
        open_model(str(model))


def test_an_adapter_alone(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="holds a LoRA adapter"):
        open_model(str(tmp_path))


@pytest.mark.parametrize(
    ("key", "value", "method"),
    [
        ("quantization_config", {"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ("quantization_config", {"quant_method": "awq"}, "awq"),
        ("compression_config", {"format": "pack-quantized"}, "an unnamed method"),
    ],
)
def test_weights_for_another_engine(model: Path, key: str, value: dict[str, str], method: str) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(UnsupportedModel, match=rf"by {method} \({key}\); take the original weights or a GGUF"):
        open_model(str(model))


@pytest.mark.parametrize(
    ("kind", "message"),
    [("adapter", "a LoRA adapter.*llama-export-lora"), ("mmproj", "general.type is 'mmproj'"), ("model", None)],
)
def test_types_of_gguf_files(tmp_path: Path, kind: str, message: str | None) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(build(metadata=METADATA | {"general.type": kind}))
    if message is None:
        assert open_model(str(path)).kind == "gguf"
        return
    with pytest.raises(UnsupportedModel, match=message):
        open_model(str(path))


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("Qwen3MoeForCausalLM", "qwen3 (dense)"),
        ("qwen3moe", "qwen3 (dense)"),
        ("Qwen3NextForCausalLM", "qwen3 (dense)"),
        ("Qwen2_5_VLForConditionalGeneration", "qwen2 (text)"),
        ("Qwen2MoeForCausalLM", "qwen2 (dense)"),
        ("MixtralForCausalLM", "mistral (dense)"),
        ("Gemma2ForCausalLM", "gemma3"),
        ("Gemma3ForConditionalGeneration", "gemma3 (text)"),
        ("gemma3n", "gemma3 (text)"),
        ("Llama4ForConditionalGeneration", "llama (text)"),
        ("SmolLM3ForCausalLM", "smollm2"),
    ],
)
def test_architectures_name_what_is_near(name: str, near: str) -> None:
    text = str(unknown_architecture("config.json", name))
    assert f"architecture '{name}' is not read; near: {near}; supported: llama" in text


@pytest.mark.parametrize("name", ["MambaForCausalLM", "phi3", None, "", 7])
def test_strangers_have_nothing_near(name: object) -> None:
    assert "is not read; supported: llama" in str(unknown_architecture("config.json", name))
