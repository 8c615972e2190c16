"""Every field of the engine and of sampling is an option, and what is given arrives."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

from paceline.cli.main import build_parsers
from paceline.cli.options import (
    ENGINE_HELP,
    FORMATS,
    drafters_of,
    engine_config,
    sampling_of,
    speculation_of,
    threshold,
)
from paceline.config import GPU, EngineConfig
from paceline.engine.assemble import read_target
from paceline.engine.memory_share import DEFAULT_KV_MEMORY
from paceline.errors import InvalidRequest
from paceline.models.weights import Format
from paceline.types import Grammar, Rule, SamplingParams

ENGINE: dict[str, tuple[str, Any]] = {
    "max_sequences": ("3", 3),
    "max_step_tokens": ("48", 48),
    "max_prompt_seconds": ("0.1", 0.1),
    "max_context": ("77", 77),
    "kv_memory": ("1.5G", 3 << 29),
    "kv_format": ("fp8", "fp8"),
    "prefix_cache": ("", False),
    "default_drafter": ("eagle", "eagle"),
    "measure_cost": ("", False),
    "measure_speedup": ("", False),
    "max_draft": ("5", 5),
    "max_draft_tokens": ("9", 9),
    "max_draft_batch": ("2", 2),
    "max_draft_context": ("100", 100),
    "min_acceptance": ("0.25", 0.25),
    "acceptance_window": ("10", 10),
    "pause_tokens": ("7", 7),
    "corpus": ("notes.txt", ("notes.txt",)),
    "drafter_timeout": ("0.5", 0.5),
    "tensor_parallel": ("2", 2),
    "drafter_tensor_parallel": ("1", 1),
    "same_bits_across_degrees": ("", True),
    "rank_timeout": ("2.5", 2.5),
    "fixed_draft": ("", True),
    "synthetic_acceptance": ("0.8", 0.8),
}
SAMPLING: dict[str, tuple[str, Any]] = {
    "temperature": ("0.3", 0.3),
    "top_k": ("4", 4),
    "top_p": ("0.9", 0.9),
    "min_p": ("0.1", 0.1),
    "repetition_penalty": ("1.5", 1.5),
    "presence_penalty": ("-0.5", -0.5),
    "frequency_penalty": ("0.25", 0.25),
    "logit_bias": ("5=-1.5,7=2", {5: -1.5, 7: 2.0}),
    "allowed_tokens": ("1,2,3", (1, 2, 3)),
    "min_tokens": ("2", 2),
    "max_tokens": ("11", 11),
    "stop": ("END", ("END",)),
    "stop_ids": ("8,9", (8, 9)),
    "include_stop": ("", True),
    "ignore_eos": ("", True),
    "seed": ("42", 42),
    "n": ("2", 2),
    "logprobs": ("1", 1),
    "prompt_logprobs": ("0", 0),
    "grammar": ("regex:[a-z]+:", Grammar.regex("[a-z]+:")),
}


def parse(*argv: str) -> Namespace:
    return build_parsers()[0].parse_args(["generate", "m", "p", *argv])


def words(name: str, text: str) -> list[str]:
    option = f"--no-{name}" if name in ("prefix_cache", "measure_cost", "measure_speedup") else f"--{name}"
    return [option.replace("_", "-"), *([text] if text else [])]


@pytest.mark.parametrize("name", [field.name for field in fields(EngineConfig)])
def test_engine_options(name: str) -> None:
    text, value = ENGINE[name]
    assert engine_config(parse(*words(name, text))) == EngineConfig(**{name: value})


def test_a_drafter_over_all_ranks() -> None:
    config = engine_config(parse("--tensor-parallel", "4", "--drafter-tensor-parallel", "4"))
    assert config == EngineConfig(tensor_parallel=4, drafter_tensor_parallel=4)


@pytest.mark.parametrize("options", [{"tensor_parallel": 2}, {"same_bits_across_degrees": True}], ids=str)
def test_a_model_is_split_on_a_gpu_only_when_it_is_served(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="on cuda ranks read a model when its engine starts"):
        read_target("nowhere", device="cuda", config=EngineConfig(**options))


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_sampling_options(name: str) -> None:
    text, value = SAMPLING[name]
    args = parse("--max-tokens", "11", *words(name, text))
    advised = SamplingParams(temperature=0.6, top_p=0.8)
    given = {"temperature": 0.6, "top_p": 0.8, "max_tokens": 11} | {name: value}
    assert sampling_of(args, advised) == SamplingParams(**given)


def test_grammars(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text('{"type": "integer"}')
    for text, grammar in (
        ("json", Grammar.json_object()),
        ("choice:yes|no", Grammar.choice(["yes", "no"])),
        (f"schema:{tmp_path}/s.json", Grammar.json_schema({"type": "integer"})),
    ):
        assert sampling_of(parse("--grammar", text), SamplingParams()).grammar == grammar


@pytest.mark.parametrize("text", ["jsn", "schema:/no/such/file", "regex:", "choice:", "choice:a||b", "json:"])
def test_grammars_that_are_none(text: str) -> None:
    with pytest.raises(InvalidRequest, match="--grammar"):
        parse("--grammar", text)


def test_drafters() -> None:
    cpu = "--device", "cpu"
    assert drafters_of(parse(*cpu)) == ["suffix"]
    assert drafters_of(parse(*cpu, "--drafter", "small", "--drafter", "ngram")) == ["small", "ngram", "portfolio"]
    assert drafters_of(parse("--drafter", "none")) == []


def test_stop_strings_add_up() -> None:
    assert sampling_of(parse("--stop", "a", "--stop", "b"), SamplingParams()).stop == ("a", "b")


def test_speculation_options() -> None:
    assert speculation_of(parse()).enabled
    assert not speculation_of(parse("--no-speculation")).enabled
    assert speculation_of(parse("--rule", "rejection")).rule is Rule.REJECTION
    lossy = speculation_of(parse("--rule", "typical", "--threshold", "0.2", "--p-min", "0.4"))
    assert (lossy.rule, lossy.threshold, lossy.p_min) == (Rule.TYPICAL, 0.2, 0.4)
    assert speculation_of(parse("--rule", "confidence", "--threshold", "code")).min_likelihood == 0.75
    with pytest.raises(ArgumentTypeError, match=r"in \(0, 1\], or one of code, json, narrative, auto, not 'prose'"):
        threshold("prose")
    assert speculation_of(parse()).p_min is None


@pytest.mark.parametrize(
    ("text", "size"),
    [("1000", 1000), ("4k", 4096), ("4KB", 4096), ("512M", 512 << 20), ("2GiB", 2 << 30), ("1T", 1 << 40)],
)
def test_sizes(text: str, size: int) -> None:
    assert engine_config(parse("--kv-memory", text)).kv_memory == size


def test_help_names_every_format() -> None:
    assert get_args(Format) == FORMATS


def test_a_gpu_has_defaults_of_its_own() -> None:
    assert engine_config(parse(), device="cuda") == EngineConfig(**GPU)
    assert engine_config(parse("--max-step-tokens", "48"), device="cuda").max_step_tokens == 48


def test_help_gives_the_defaults_of_both(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    for name, value in GPU.items():
        usual = getattr(EngineConfig(), name)
        said = ("on", "off") if name == "measure_speedup" else (usual, value)
        assert f"(default: {said[0]}, on a GPU {said[1]})" in text
    assert f"at most {DEFAULT_KV_MEMORY >> 30}G" in ENGINE_HELP["kv_memory"]
