"""`paceline bench engine` from the command line to its last line of JSON, with tiny random models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.bench import machine
from tests.cli.conftest import Cli

SHORT = ("--prompt-tokens", 12, "--output-tokens", 20, "--threads", 1, "--device", "cpu")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


@pytest.fixture(autouse=True)
def _small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine.COPY_BYTES, "cpu", 1 << 20)


@pytest.fixture
def shape(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    return str(path)


def found(cli: Cli, *argv: object) -> tuple[str, dict[str, Any]]:
    status, out, err = cli("bench", "engine", *SHORT, *argv, "--json")
    assert (status, err) == (0, "")
    text, _, last = out.rstrip("\n").rpartition("\n")
    return text, json.loads(last)


def test_plain(cli: Cli, shape: str) -> None:
    text, record = found(cli, "--target", shape, "--batch", "1,3", "--rounds", 2)
    one, three = record["batches"]
    assert (one["batch"], three["batch"]) == (1, 3)
    assert len(one["plain"]["tok_s_runs"]) == 2
    assert three["plain"]["tokens_per_step"] == three["plain"]["tokens_per_round"] == 1.0
    assert three["plain"]["bandwidth_fraction"] > 0
    assert three["plain"]["parts_ms"]["verify"] > 0
    assert record["acceptance"] == "real"
    assert record["machine"]["cores"] >= 1
    assert record["engines"]["plain"]["target_weights"] == 4 * weights()
    assert "speculative" not in three
    assert "tokens/step" in text
    assert text.endswith(record["conclusion"])
    assert record["conclusion"].startswith("Plain decoding gives up to ")


def weights() -> int:
    """Parameters of CONFIG that a pass reads: all but the embedding."""
    layer = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 96 + 2 * 64
    return 2 * layer + 64 + 48 * 64


def test_ngram_and_speculation_off(cli: Cli, shape: str) -> None:
    argv = ("--target", shape, "--drafter", "ngram:min_ngram=1", "--batch", 2, "--draft", 3, "--rounds", 1, "--off")
    _, record = found(cli, *argv)
    [batch] = record["batches"]
    assert batch["same_tokens"] == "2/2"
    assert batch["speculative"]["tokens_per_step"] > 1.0
    assert batch["off"]["tokens_per_step"] == 1.0
    assert batch["ratio"] > 0
    assert batch["off_ratio"] > 0
    assert record["interleaved"]
    assert record["conclusion"].endswith("same text in 2 of 2.")


def test_mixes_run_beside_the_batch_without_them(cli: Cli, shape: str) -> None:
    argv = ("--target", shape, "--drafter", "ngram", "--batch", 2, "--rounds", 1, "--mix", "logprobs:1,penalty:2")
    text, record = found(cli, *argv)
    mixes = record["batches"][0]["mixes"]
    assert [(each["mode"], each["mix"]) for each in mixes] == [
        (mode, mix) for mode in ("plain", "speculative") for mix in ("logprobs:1", "penalty:2")
    ]
    assert all(each["ratio"] > 0 and len(each["tok_s_runs"]) == 1 for each in mixes)
    assert "speculative, penalty:2" in text


def test_a_mix_with_a_schema(cli: Cli, tiny: str) -> None:
    _, record = found(cli, "--target", tiny, "--batch", 2, "--rounds", 1, "--mix", "json:2")
    assert record["batches"][0]["mixes"][0]["tok_s"] > 0


def test_a_shape_drafts_for_a_shape(cli: Cli, shape: str) -> None:
    argv = ("--target", shape, "--drafter", shape, "--draft", 3, "--rounds", 1)
    _, record = found(cli, *argv, "--seed", 1)  # that of all random drafters
    [batch] = record["batches"]
    assert batch["same_tokens"] == "1/1"
    assert batch["speculative"]["tokens_per_step"] > 3  # the same weights: every guess is right
    assert record["engines"]["speculative"]["drafter_weights"] == 4 * weights()


def test_the_engine_may_choose_how_long_drafts_are(cli: Cli, shape: str) -> None:
    argv = ("--target", shape, "--drafter", "ngram:min_ngram=1", "--batch", 2, "--draft", 3, "--rounds", 1)
    text, record = found(cli, *argv, "--governed")
    assert record["setup"]["governed"]
    assert "at most 3 drafted" in text
    assert record["batches"][0]["same_tokens"] == "2/2"


def test_a_model_with_weights(cli: Cli, tiny: str) -> None:
    _, record = found(cli, "--target", tiny, "--format", "int8", "--rounds", 1)
    assert record["batches"][0]["plain"]["tok_s"] > 0
    small = record["engines"]["plain"]
    _, record = found(cli, "--target", tiny, "--format", "fp8", "--rounds", 1)
    large = record["engines"]["plain"]  # there are no kernels for it on a CPU: it runs as float32
    assert "fp8" in large["target"]
    assert small["target_weights"] == large["target_weights"] or "compiled" in small["target"]
    assert 3 < large["target_weights"] / small["target_weights"] < 4 or "compiled" not in small["target"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--target", "no-such-model"], "no model 'no-such-model'"),
        (["--target", "x", "--off"], "name one with --drafter"),
        (["--target", "x", "--governed"], "name one with --drafter"),
        (["--target", "x", "--mix", "jason:1"], "unknown mix 'jason'"),
        (["--target", "x", "--mix", "bias"], "a mix is KIND:COUNT"),
        (["--target", "x", "--mix", "bias:2"], "mix bias:2 needs 2 requests at once, a batch has 1"),
        (["--target", "llama-3.1-8b", "--mix", "json:1"], "mix json needs a model with a tokenizer"),
        (["--target", "x", "--batch", "1,0"], "a whole number from 1 on is needed, not '0'"),
        (["--target", "x", "--batch", "2,2"], "a number stands twice in '2,2'"),
        (["--target", "x", "--bach", "2"], "unknown option '--bach'; did you mean '--batch'?"),
        (["--target", "x", "--format", "int3"], "invalid choice: 'int3'"),
        ([], "the following arguments are required: --target"),
    ],
)
def test_bad_requests(cli: Cli, argv: list[str], message: str) -> None:
    status, out, err = cli("bench", "engine", *argv)
    assert (status, out) == (2, "")
    assert message in err


def test_what_to_measure_must_be_said(cli: Cli) -> None:
    status, _, err = cli("bench")
    assert status == 2
    assert "required: BENCHMARK" in err


def test_no_gpu_is_said(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    status, _, err = cli("bench", "engine", "--target", "x", "--device", "cuda")
    assert status == 2
    assert "no CUDA device" in err


def test_help_names_every_shape(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    from paceline.models.shapes import SHAPES

    with pytest.raises(SystemExit):
        cli("bench", "engine", "--help")
    out = " ".join(capsys.readouterr().out.split())
    assert all(name in out for name in SHAPES)
    assert "SYNTHETIC" in out
