from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from paceline.kernels.base import PAGE_SIZE
from paceline.kernels.cpu.build import NoCompiler
from tests.cli.conftest import Cli
from tests.cli.tiny_model import CONTEXT, HEAD_DIM, HIDDEN, KV_HEADS, LAYERS, write_model


def facts(cli: Cli, *argv: object) -> dict[str, Any]:
    status, out, err = cli("inspect", *argv, "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert isinstance(found, dict)
    return found


def test_what_a_model_is(cli: Cli, tiny: str) -> None:
    found = facts(cli, tiny, "--format", "fp32", "--threads", "1")
    model, [weights] = found["model"], found["weights"]
    assert model["architecture"] == "llama"
    assert (model["layers"], model["hidden_size"], model["context"]) == (LAYERS, HIDDEN, CONTEXT)
    assert weights["format"] == "float32"
    assert weights["bytes"] == 4 * weights["parameters"] == 4 * model["parameters"]
    assert found["tokenizer"]["vocab_size"] == model["vocab_size"] == 259
    assert found["tokenizer"]["eos"] == ["<|end|>"]
    assert found["tokenizer"]["chat_template"]
    assert found["sampling"] == {"temperature": 0.5, "top_k": 40}


def test_what_will_run_and_why(cli: Cli, tiny: str) -> None:
    floats, integers = facts(cli, tiny, "--format", "fp32"), facts(cli, tiny, "--format", "int8", "--threads", "1")
    assert not floats["runs"]["bitwise"]
    assert "torch: " in floats["runs"]["why"]
    assert integers["runs"]["bitwise"] == integers["runs"]["compiled"]
    assert integers["runs"]["threads"] == 1
    assert integers["weights"][0]["format"].startswith("8-bit, by channel")
    assert integers["model"]["parameters"] == floats["model"]["parameters"]


def test_memory_adds_up(cli: Cli, tiny: str) -> None:
    memory = facts(cli, tiny, "--format", "fp32", "--kv-memory", "1M", "--max-context", "100")["memory"]
    per_token = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4
    assert memory["kv_bytes_per_token"] == memory["target_kv_bytes_per_token"] == per_token
    assert memory["kv_bytes"] == memory["kv_tokens"] * per_token <= 1 << 20
    assert memory["kv_tokens"] % PAGE_SIZE == 0
    assert memory["bytes"] == memory["weight_bytes"] + memory["kv_bytes"]
    assert memory["max_context"] == 100


def test_a_drafting_model_shares_the_memory(cli: Cli, tiny: str, tmp_path: Path) -> None:
    drafter = write_model(tmp_path, seed=1)
    found = facts(cli, tiny, "--format", "fp32", "--drafter", "ngram", "--drafter", drafter)
    lookup, model = found["drafters"]
    assert (lookup["name"], lookup["weight_bytes"]) == ("ngram", 0)
    assert (model["name"], model["model"]) == ("model", str(drafter))
    memory = found["memory"]
    assert memory["kv_bytes_per_token"] == 2 * memory["target_kv_bytes_per_token"]
    assert memory["weight_bytes"] == found["weights"][0]["bytes"] + model["weight_bytes"]


def test_for_people(cli: Cli, tiny: str) -> None:
    status, out, _ = cli("inspect", tiny, "--format", "fp32")
    assert status == 0
    for words in (
        "llama, 0.",
        "M parameters, 2 layers",
        "not bitwise",
        "bytes of KV a token",
        "with chat template",
        "ngram: ",
    ):
        assert words in out


def test_errors_of_quantisation(cli: Cli, tiny: str) -> None:
    found = facts(cli, tiny, "--format", "int4", "--threads", "1", "--errors")["errors"]
    assert [error["kind"] for error in found] == ["q", "k", "v", "o", "gate", "up", "down", "embed", "head"]
    by_kind = {error["kind"]: error for error in found}
    assert by_kind["q"]["matrices"] == LAYERS
    assert 0.02 < by_kind["q"]["mean"] <= by_kind["q"]["max"] < 0.2
    assert 0 < by_kind["head"]["max"] < 0.01
    assert "errors" not in facts(cli, tiny, "--format", "fp32")


def test_errors_for_people(cli: Cli, tiny: str) -> None:
    status, out, _ = cli("inspect", tiny, "--format", "fp8", "--errors")
    assert status == 0
    assert "8-bit float, by channel, as float32" in out
    assert re.search(r"^  down +2\.\d+% +2\.\d+%  fp8, worst in layers\.\d\.down$", out, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--drafter", "nothing-here"], "unknown drafter 'nothing-here'"),
        (["--kv-memory", "10k"], "raise kv_memory or lower max_context"),
    ],
)
def test_bad_requests(cli: Cli, tiny: str, argv: list[str], message: str) -> None:
    status, out, err = cli("inspect", tiny, *argv)
    assert (status, out) == (2, "")
    assert message in err


def test_a_broken_model_is_named(cli: Cli, tmp_path: Path) -> None:
    path = write_model(tmp_path)
    (path / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{}")
    status, _, err = cli("inspect", path)
    assert status == 2
    assert "model.safetensors" in err
    assert err.count("\n") == 1


def test_without_a_compiler_torch_runs_and_says_so(cli: Cli, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler() -> None:
        raise NoCompiler("no C compiler found")

    monkeypatch.setattr("paceline.runner.load.load_library", no_compiler)
    status, out, err = cli("inspect", tiny, "--format", "int8", "--json")
    found = json.loads(out)
    assert status == 0
    assert err.count("\n") == 1
    assert "no C compiler found" in err
    assert "no C compiler found" in found["runs"]["why"]
    assert not found["runs"]["bitwise"]
    assert found["weights"][0]["format"] == "8-bit, by channel, as float32"
    assert found["memory"]["weight_bytes"] == 4 * found["model"]["parameters"]
