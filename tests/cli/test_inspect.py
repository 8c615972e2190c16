from __future__ import annotations

import json
import re
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.cli import inspect
from paceline.cli.pair import ASKED, pairs_of
from paceline.errors import NoCompiler
from paceline.kernels.base import PAGE_SIZE
from paceline.models.gguf import GgufFile
from paceline.models.load import load_model
from paceline.models.safetensors import SafetensorsFolder
from paceline.runner.loading.memory import weight_parts
from paceline.runner.loading.models import ReadyModel
from paceline.text.tokenizer import Tokenizer
from tests.cli.conftest import Cli
from tests.cli.tiny_model import CONTEXT, HEAD_DIM, HIDDEN, KV_HEADS, LAYERS, write_model
from tests.published_heads import LAYOUTS


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
    assert found["sampling_source"] == "generation_config.json"
    text = cli("inspect", tiny, "--format", "fp32")[1]
    assert "  temperature 0.5, top_k 40 where nothing else is asked for\n  source: generation_config.json" in text


def test_what_will_run_and_why(cli: Cli, tiny: str) -> None:
    floats, integers = facts(cli, tiny, "--format", "fp32"), facts(cli, tiny, "--format", "int8", "--threads", "1")
    assert not floats["runs"]["bitwise"]
    assert "torch: " in floats["runs"]["why"]
    assert integers["runs"]["bitwise"] == integers["runs"]["compiled"]
    assert integers["runs"]["threads"] == 1
    assert integers["weights"][0]["format"].startswith("8-bit, by channel")
    assert integers["model"]["parameters"] == floats["model"]["parameters"]


def test_formats_are_timed_and_not_chosen(cli: Cli, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = {"int8": 0.002, "int4": 0.0019, "int4-all": 0.001}
    monkeypatch.setattr("paceline.runner.loading.format_speed.format_times", lambda ready, formats: timed)
    found = facts(cli, tiny, "--format", "int8", "--threads", "1")
    if not found["runs"]["compiled"]:
        pytest.skip("no compiler")
    assert found["formats"] == {"int8": 2.0, "int4": 1.9, "int4-all": 1.0}
    assert found["weights"][0]["format"].startswith("8-bit"), "the format that was asked for runs"
    text = cli("inspect", tiny, "--format", "int8")[1]
    assert "  ms a token by format: int8 2.00, int4 1.90, int4-all 1.00\n" in text
    assert "  --format int4-all would be 2.00 times as fast here, and gives another text\n" in text
    assert "no format is clearly faster here than int8" in inspect._format_lines({"int8": 2.0, "int4": 1.9})
    assert "not timed" in inspect._format_lines({})[0]
    assert inspect._format_lines(None) == []


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
    lookup, model, portfolio = found["drafters"]
    assert portfolio["name"] == "portfolio"
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
        "suffix: ",
    ):
        assert words in out


def test_only_headers_are_read(cli: Cli, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any number of the tensors, the facts are those of loaded weights."""
    loaded = weight_parts(load_model(tiny, format="int4"), packed=True)
    reads: list[str] = []

    def watched(original: Any) -> Any:
        def read(self: Any, name: str, *rows: int) -> Any:
            reads.extend([] if self._blank else [name])
            return original(self, name, *rows)

        return read

    monkeypatch.setattr(GgufFile, "_rows", watched(GgufFile._rows))
    monkeypatch.setattr(SafetensorsFolder, "read_float", watched(SafetensorsFolder.read_float))
    smollm2 = facts(cli, "smollm2", "--drafter", "eagle:smollm2")
    assert smollm2["drafters"][0]["why"].startswith("an EAGLE-3 head (")
    assert smollm2["model"]["parameters"] == 134_515_008
    found = facts(cli, tiny, "--format", "int4", "--drafter", write_model(tmp_path, seed=1))
    assert found["weights"] == [asdict(part) for part in loaded]
    assert reads == []


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


def test_the_device_is_the_one_that_would_run(cli: Cli, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the decoder has taken the weights over before anybody can count them. This one is on a CPU, in bf16."""
    cuda = pytest.importorskip("paceline.runner.forwards.cuda", reason="needs Triton")
    asked = []

    def read(name: str, *, device: str, **options: Any) -> ReadyModel:
        asked.append((device, options["kv_format"], options["format"]))
        model = load_model(name, format="bf16")
        parts = weight_parts(model, packed=True)
        decoder = cuda.CudaDecoder(model.config, model.weights, max_context=64, device="cpu", pdl=False)
        tokenizer = Tokenizer.from_directory(model.path)
        return ReadyModel(name, model, tokenizer, compiled=False, why="a GPU", decoder=decoder, parts=parts)

    monkeypatch.setattr("paceline.engine.assemble.read_model", read)
    monkeypatch.setattr("paceline.runner.loading.models.choose_device", lambda name: {"auto": "cuda"}[name])
    monkeypatch.setattr("paceline.cli.inspect._errors", lambda name, format, device: [device])
    found = facts(cli, tiny, "--kv-memory", "1M", "--drafter", "self:fp8", "--errors")
    assert asked == [("cuda", "bf16", "auto")]
    matrices, vectors = found["weights"]
    assert (matrices["format"], vectors["format"]) == ("bfloat16", "float32")
    assert matrices["bytes"] == 2 * matrices["parameters"]
    runs = {"device": "cpu", "compiled": False, "why": "a GPU", "threads": None, "threads_why": None, "bitwise": False}
    assert found["runs"] == runs
    assert found["formats"] is None
    assert found["errors"] == ["cuda"]
    (copy,) = found["drafters"]
    assert copy["why"] == "the target in fp8, on its KV memory"
    assert 0 < copy["weight_bytes"] < matrices["bytes"]
    assert found["memory"]["weight_bytes"] == matrices["bytes"] + vectors["bytes"] + copy["weight_bytes"]
    assert found["memory"]["kv_bytes_per_token"] == 2 * LAYERS * KV_HEADS * HEAD_DIM * 2


def test_a_gpu_has_no_threads() -> None:
    assert not any("threads" in line for line in inspect._runs_lines({"why": "", "threads": None, "bitwise": True}))
    lines = inspect._runs_lines({"why": "a CPU", "threads": 8, "threads_why": "as asked for", "bitwise": True})
    assert "8 threads, as asked for" in lines


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--device", "cuda"], "torch finds no CUDA device; use device cpu"),
        (["--device", "cpu", "--kv-format", "fp8"], "kv_format 'fp8' is for a GPU"),
        (["--drafter", "nothing-here"], "unknown drafter 'nothing-here'"),
        (["--kv-memory", "10k"], "raise kv_memory or lower max_context"),
    ],
)
def test_bad_requests(cli: Cli, tiny: str, argv: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
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


HEADS: dict[str, tuple[str, str, str]] = {  # what is wrong → kind of drafter, file that is changed, what is said
    "pickle": ("eagle", "pytorch_model.bin", "pytorch_model.bin is a pickle, which can run code when it is read"),
    "pickle of medusa": ("medusa", "medusa_lm_head.pt", "medusa_lm_head.pt is a pickle, which can run code"),
    "torn": ("eagle", "", "model.safetensors: not a readable safetensors file"),
    "no config": ("eagle", "gone", "holds neither config.json nor a GGUF file"),
}


@pytest.mark.parametrize("case", HEADS)
def test_a_broken_head_is_named(case: str, cli: Cli, tiny: str, tmp_path: Path) -> None:
    kind, file, said = HEADS[case]
    head = LAYOUTS["eagle3"].write(tmp_path / "head", vocab=259)
    if kind == "medusa":
        (head / "config.json").write_text(json.dumps({"medusa_num_heads": 2}))
    if case == "torn":
        (head / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{}")
    else:
        (head / ("config.json" if case == "no config" else "model.safetensors")).rename(head / file)
    status, out, err = cli("inspect", tiny, "--device", "cpu", "--drafter", f"{kind}:{head}")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_without_a_compiler_torch_runs_and_says_so(cli: Cli, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler() -> None:
        raise NoCompiler("no C compiler found")

    monkeypatch.setattr("paceline.runner.loading.models.load_library", no_compiler)
    status, out, err = cli("inspect", tiny, "--format", "int8", "--json")
    found = json.loads(out)
    assert status == 0
    assert err.count("\n") == 1
    assert "no C compiler found" in err
    assert "no C compiler found" in found["runs"]["why"]
    assert not found["runs"]["bitwise"]
    assert found["weights"][0]["format"] == "8-bit, by channel, as float32"
    assert found["memory"]["weight_bytes"] == 4 * found["model"]["parameters"]


def test_a_pair_is_judged(cli: Cli, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one two one two\nthree four three four\n", encoding="utf-8")
    short = {"prompts": [str(prompts)], "max_tokens": 8, "draft": (2,), "raw": True, "ignore_eos": True}
    monkeypatch.setattr("paceline.cli.inspect.pairs_of", partial(pairs_of, asked={**ASKED, **short}))
    drafter = write_model(tmp_path, seed=1)
    argv = ("inspect", tiny, "--device", "cpu", "--threads", 1, "--drafter", drafter, "--pair")
    status, out, _ = cli(*argv)
    assert status == 0
    assert f"{drafter}: " in out
    assert "times plain speed with drafts of 2, by too few answers for an interval." in out
    [pair] = json.loads(cli(*argv, "--json")[1])["pairs"]
    assert pair["drafter"] == str(drafter)
    assert 0 <= pair["coupled"] <= 1


def test_a_head_with_a_part_of_the_vocabulary(cli: Cli, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.drafters.eagle.drafter.SHAPE_VOCAB", 40)
    status, out, _ = cli("inspect", tiny, "--device", "cpu", "--drafter", "eagle:shape")
    assert status == 0
    assert "% of the target's vocabulary" in out
