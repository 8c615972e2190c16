"""Sampling without parameters is what the authors advise: the file's word, then the table's, then temperature 1."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from paceline.models.advice import FAMILIES, NO_ADVICE, advice_by_name
from paceline.models.load import open_model
from paceline.types import SamplingParams
from tests.cli.tiny_model import write_model
from tests.models.broken import METADATA, build


@pytest.mark.parametrize(
    ("name", "temperature", "top_p"),
    [
        ("SmolLM2-135M-Instruct.Q4_1", 0.2, 0.9),
        ("HuggingFaceTB/SmolLM2-1.7B-Instruct", 0.2, 0.9),
        ("qwen2.5-coder-1.5b-instruct-q4_k_m", 0.7, 0.8),
        ("Qwen2.5 7B Instruct", 0.7, 0.8),
        ("Qwen3-4B-Instruct-2507", 0.7, 0.8),
        ("Qwen3-0.6B", 0.6, 0.95),
        ("Meta-Llama-3.1-8B-Instruct", 0.6, 0.9),
        ("Llama-2-7b-chat-hf", 0.6, 0.9),
        ("DeepSeek-R1-Distill-Qwen-1.5B", 0.6, 0.95),
        ("gemma-3-1b-it", 1.0, 0.95),
        ("Mistral-Nemo-Instruct-2407", 0.3, None),
        ("Mistral-Small-3.2-24B-Instruct-2506", 0.15, None),
    ],
)
def test_well_known_names(name: str, temperature: float, top_p: float | None) -> None:
    values = advice_by_name([None, 7, name]).values
    assert (values["temperature"], values.get("top_p")) == (temperature, top_p)


def test_small_and_large_qwens_differ_in_their_penalty() -> None:
    penalties = [advice_by_name([f"Qwen2.5-{size}-Instruct"]).values["repetition_penalty"] for size in ("0.5B", "7B")]
    assert penalties == [1.1, 1.05]


@pytest.mark.parametrize("name", ["SmolLM2-135M", "Qwen3-0.6B-Base", "Llama-3.2-1B", "gemma-3-1b-pt", "my-model", ""])
def test_base_models_and_strangers_have_none(name: str) -> None:
    assert advice_by_name([name]) == NO_ADVICE
    assert str(NO_ADVICE) == "temperature 1"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.title)
def test_every_row_is_valid_sampling(family) -> None:
    SamplingParams.of(**family.values)


def test_a_gguf_file_is_known_by_its_metadata_and_by_its_name(tmp_path) -> None:
    path = tmp_path / "tiny-instruct.gguf"
    path.write_bytes(build(metadata=METADATA | {"general.basename": "smollm2"}))
    advice = open_model(str(path)).generation
    assert str(advice) == "temperature 0.2, top_p 0.9"
    assert "row 'SmolLM2 Instruct'" in advice.source
    path.write_bytes(build(metadata=METADATA | {"general.basename": "smollm2", "general.sampling.temp": 0.5}))
    advice = open_model(str(path)).generation
    assert (str(advice), advice.source) == ("temperature 0.5", "the file's metadata (general.sampling)")


def test_a_directory_is_known_by_its_name_where_its_file_says_nothing(tmp_path) -> None:
    folder = tmp_path / "SmolLM2-135M-Instruct"
    folder.mkdir()
    write_model(folder)
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": 2}))
    assert open_model(str(folder)).generation.values == {"temperature": 0.2, "top_p": 0.9}
    file.write_text(json.dumps({"do_sample": False}))
    advice = open_model(str(folder)).generation
    assert (str(advice), advice.source) == ("temperature 0", "generation_config.json")


def test_the_embedded_model_answers_as_its_authors_advise() -> None:
    assert open_model("smollm2").generation.values == {"temperature": 0.2, "top_p": 0.9}


def test_the_documents_have_the_table() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    rows = {title: cells for title, *cells in (re.split(r" *\| *", line.strip("| ")) for line in text.split("\n"))}
    for family in FAMILIES:
        said = [family.values.get(name) for name in ("temperature", "top_p", "top_k", "repetition_penalty")]
        assert [float(cell) for cell in rows[family.title] if cell] == [value for value in said if value is not None]
