"""`paceline drafters` from the command line, with tiny random models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from paceline.cli import drafters
from paceline.config import EngineConfig
from paceline.drafters.shipped import SHIPPED
from paceline.engine.assemble import read_target
from paceline.tune import available as module
from paceline.tune.available import available, card_figures, results_of
from paceline.tune.expected import ON_CPU, ON_GPU, Figure, figure_of
from tests.block_heads import LAYOUTS as BLOCKS
from tests.cli.conftest import Cli
from tests.cli.tiny_model import write_model
from tests.published_heads import LAYOUTS


@pytest.fixture(autouse=True)
def no_models_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafters, "models_here", list)


def listed(cli: Cli, *argv: object) -> dict[str, Any]:
    status, out, err = cli("drafters", *argv, "--device", "cpu", "--json")
    assert status == 0, err
    return {each["drafter"]: each for each in map(json.loads, out.splitlines())}


def test_lookups_and_what_can_be_trained(cli: Cli, tiny: str) -> None:
    found = listed(cli, tiny)
    free = ["recycling", "lookahead", "layers:auto", "self:int4"]
    trained = ["eagle:drafter", "block:drafter", "mtp:drafter"]
    assert [*found] == ["suffix", "ngram", "prediction", *free, *trained]
    assert found["ngram"]["command"] == f"paceline serve {tiny} --drafter ngram"
    for kind in ("eagle", "block", "mtp"):
        assert found[f"{kind}:drafter"]["command"] == f"paceline train {kind} {tiny} --prompts FILE --out drafter"
    assert all(each["pair"] is None for each in found.values())
    assert found["ngram"]["known"][0].startswith("expected: smollm2 with ngram on two cores of a Zen 4 had 1.99 times")
    assert found["prediction"]["known"] == [], "nothing is known, and nothing is said"
    status, out, _ = cli("drafters", tiny, "--device", "cpu")
    assert status == 0
    assert "ngram\n  lookup in prompt and output\n  needs nothing\n  expected: smollm2" in out
    assert f"paceline drafters {tiny} --measure" in out


def test_a_directory(cli: Cli, tiny: str, tmp_path: Path) -> None:
    for name in ("as large", "head", "medusa", "empty", "broken", "list", "no config"):
        (tmp_path / name).mkdir()
    write_model(tmp_path / "as large", seed=1)
    config = {"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 7}
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    (tmp_path / "medusa" / "config.json").write_text(json.dumps({"medusa_num_heads": 2}))
    (tmp_path / "broken" / "config.json").write_text(json.dumps({"architectures": ["Strange"]}))
    (tmp_path / "list" / "config.json").write_text("[1]")
    (tmp_path / "no config" / "config.json").symlink_to("nowhere.json")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "torn.gguf").write_bytes(b"GGUF")
    (tmp_path / "notes.txt").write_text("nothing")
    (tmp_path / "itself").symlink_to(tiny)
    found = listed(cli, tiny, "--in", tmp_path)
    mine = {words.replace(str(tmp_path), "DIR"): each for words, each in found.items() if str(tmp_path) in words}
    assert {*mine} == {
        "model:DIR/as large",
        "eagle:DIR/head",
        "medusa:DIR/medusa",
        "model:DIR/broken",
        "model:DIR/torn.gguf",
        "DIR/list",
        "DIR/no config",
    }
    assert "holds list where a JSON object is needed" in mine["DIR/list"]["why_not"]
    assert "not readable as JSON" in mine["DIR/no config"]["why_not"]
    assert "M parameters: it can only lose" in mine["model:DIR/as large"]["why_not"].replace(
        "0 M: it", "0 M parameters: it"
    )
    assert all(each["why_not"] and each["command"] is None for each in mine.values())
    assert "eagle:drafter" in found, "no head here can be used"
    status, out, _ = cli("drafters", tiny, "--device", "cpu", "--in", tmp_path)
    assert status == 0
    assert "cannot draft: " in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--in", "nowhere"), "--in nowhere is no directory: give one that holds models or heads"),
        (("--drafter", "ngram"), "all drafters are listed: leave out --drafter"),
        (("--results", "nowhere.jsonl"), "--results nowhere.jsonl is no file of `python -m peers.drafters`"),
    ],
)
def test_bad_options(cli: Cli, tiny: str, words: tuple[str, ...], said: str) -> None:
    status, _, err = cli("drafters", tiny, "--device", "cpu", *words)
    assert status == 2
    assert said in err


def test_measured_pairs(cli: Cli, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    pair = {"drafter": "ngram", "verdict": "ngram helps.", "vocabulary": 1.0, "weight_bytes": 0}
    pair |= {"kv_bytes_per_token": 0, "overlap": 0.5, "coupled": None, "temperature": 1.0}

    def judge(args: Any, *, asked: dict[str, Any]) -> list[dict[str, Any]]:
        found.update(asked)
        return [pair]

    found = asked
    monkeypatch.setattr(drafters, "pairs_of", judge)
    status, out, _ = cli("drafters", tiny, "--device", "cpu", "--measure")
    assert status == 0
    assert "  ngram helps." in out
    without = "recycling,lookahead,self:int4"  # the tiny target runs in torch, where layers are not measured
    assert asked["candidates"] == f"suffix,ngram,{without}", "predictions and heads that do not exist have no study"
    assert "  prediction is not judged: it drafts only for requests that bring a prediction" in out
    told = listed(cli, tiny, "--measure")
    assert told["ngram"]["pair"] == pair
    assert told["prediction"]["pair"]["why_not"].startswith("it drafts only for requests")


def a_file(path: Path, target: str, *, drafter: str = "ngram", **fields: Any) -> Path:
    cell = {"ratio": 1.5, "ratio_interval": [1.2, 1.8], "tokens_per_step": 2.25} | fields
    facts = {"target": target, "format": "int8", "set": "mt_bench", "drafter": drafter, "cell": cell}
    path.write_text("\n".join(json.dumps(each) for each in ({"benchmark": "drafters", "setup": {}}, facts)))
    return path


def test_stored_figures(cli: Cli, tiny: str, tmp_path: Path) -> None:
    file = a_file(tmp_path / "a.jsonl", tiny)
    known = listed(cli, tiny, "--results", file)["ngram"]["known"]
    assert known == ["1.50 times plain speed [1.20, 1.80], 2.25 tokens per step on mt_bench, int8"]
    file = a_file(tmp_path / "b.jsonl", Path(tiny).name, ratio=None, ratio_interval=None)
    assert listed(cli, tiny, "--results", file)["ngram"]["known"] == ["2.25 tokens per step on mt_bench, int8"]
    target: Any = SimpleNamespace(name="another", model=SimpleNamespace(path=Path("another.gguf")))
    assert results_of(file, target) == {}


def test_stored_figures_of_a_draft_model_name_no_folder(cli: Cli, tiny: str, tmp_path: Path) -> None:
    (tmp_path / "models" / "small").mkdir(parents=True)
    write_model(tmp_path / "models" / "small", seed=1)
    file = a_file(tmp_path / "a.jsonl", tiny, drafter="model:small")
    words = f"model:{tmp_path / 'models' / 'small'}"
    assert listed(cli, tiny, "--in", tmp_path / "models", "--results", file)[words]["known"] == [
        "1.50 times plain speed [1.20, 1.80], 2.25 tokens per step on mt_bench, int8"
    ]


def test_drafters_that_a_target_cannot_have_get_no_command(cli: Cli, tiny: str) -> None:
    """A copy of 4-bit weights loses no bits, and layers are measured in compiled passes."""
    found = listed(cli, tiny, "--format", "int4")
    assert found["self:int4"]["why_not"].startswith("no layer of ")
    assert found["self:int4"]["command"] is None
    found = listed(cli, tiny, "--format", "fp32")
    assert found["layers:auto"]["why_not"].startswith("layers:auto measures compiled passes")
    assert found["layers:auto"]["command"] is None


def test_the_card_of_a_head(tmp_path: Path) -> None:
    [said] = card_figures(SHIPPED / "smollm2")
    assert said.startswith("tokens per round by its card: 3.11 on mt_bench, ")
    assert card_figures(tmp_path) == ()


def test_on_a_gpu(tiny: str) -> None:
    target = read_target(tiny, config=EngineConfig())
    names = [each.drafter for each in available(target, [], device="cuda", folder=None, results=None)]
    assert names == ["suffix", "ngram", "prediction", "self", "eagle:drafter", "block:drafter", "mtp:drafter"]


def test_layers_in_the_checkpoint(tmp_path: Path) -> None:
    write_model(tmp_path)
    config = tmp_path / "config.json"
    target = read_target(str(tmp_path), config=EngineConfig())
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 1}))
    [found] = module._in_checkpoint(target, "cpu")
    assert (found.drafter, found.origin, found.command) == ("mtp", "1 layers in the checkpoint", None)
    assert "num_nextn_predict_layers" in str(found.why_not)  # the files have no such tensors


@pytest.mark.parametrize("count", ["one", [2], True, {"a": 1}])
def test_a_count_that_is_none_is_a_line(count: object, tmp_path: Path) -> None:
    write_model(tmp_path)
    target = read_target(str(tmp_path), config=EngineConfig())
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": count}))
    [found] = module._in_checkpoint(target, "cpu")
    assert "num_nextn_predict_layers" in str(found.why_not)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": None}))
    assert module._in_checkpoint(target, "cpu") == []


def test_good_heads_are_listed_beside_broken_ones(cli: Cli, tiny: str, tmp_path: Path) -> None:
    vocab = read_target(tiny, config=EngineConfig()).model.config.vocab_size
    for name in ("good", "torn", "pickled", "lacking"):
        LAYOUTS["eagle3"].write(tmp_path / name, vocab=vocab)
    BLOCKS["dflash"].write(tmp_path / "good block", vocab=vocab)
    torn = tmp_path / "torn" / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:999])
    (tmp_path / "pickled" / "model.safetensors").rename(tmp_path / "pickled" / "pytorch_model.bin")
    lacking = tmp_path / "lacking" / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(lacking).items() if name != "norm.weight"}, lacking)
    found = listed(cli, tiny, "--in", tmp_path)
    good = {f"eagle:{tmp_path / 'good'}", f"block:{tmp_path / 'good block'}"}
    assert {words for words, each in found.items() if str(tmp_path) in words and each["why_not"] is None} == good
    assert all(found[words]["command"].startswith("paceline serve") for words in good)
    assert "eagle:drafter" not in found, "a good one is there"
    assert {"block:drafter", "mtp:drafter"} & {*found} == {"mtp:drafter"}
    for name, said in {
        "torn": "not a readable safetensors file",
        "pickled": "pytorch_model.bin is a pickle",
        "lacking": "tensor 'norm.weight' [64] is missing",
    }.items():
        assert said in found[f"eagle:{tmp_path / name}"]["why_not"]


def test_a_folder_that_cannot_be_read_is_a_line(
    cli: Cli, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "locked").mkdir()
    iterdir = Path.iterdir

    def denied(self: Path) -> Any:
        if self.name == "locked":
            raise PermissionError(13, "Permission denied", str(self))
        return iterdir(self)

    monkeypatch.setattr(Path, "iterdir", denied)
    assert "Permission denied" in listed(cli, tiny, "--in", tmp_path)[str(tmp_path / "locked")]["why_not"]
    status, _, err = cli("drafters", tiny, "--device", "cpu", "--in", tmp_path / "locked")
    assert (status, "cannot be read: [Errno 13]" in err) == (2, True)


def test_figures_that_come_with_the_package() -> None:
    [own] = figure_of("eagle:smollm2", "smollm2", device="cpu")
    assert own.startswith("measured on two cores of a Zen 4: 2.26 times plain speed")
    [other] = figure_of("eagle:./head", "llama", device="cuda")
    assert other.startswith("expected: smollm2 with eagle:smollm2 on an H200 had 2.04 times")
    assert figure_of("echo", "smollm2", device="cpu") == figure_of("ngram", "smollm2", device="cuda") == ()


@pytest.mark.parametrize("figure", [*ON_CPU.values(), *ON_GPU.values()], ids=lambda figure: figure.drafter)
def test_their_sources_are_there(figure: Figure) -> None:
    page, _, title = figure.source.partition(", ")
    text = (Path(__file__).parents[2] / page).read_text(encoding="utf-8")
    _, found, after = text.partition(f" {title.strip(chr(34))}")
    section = re.split(r"\n#{1,3} ", after)[0] if found else ""
    numbers = re.findall(r"\d+\.\d\d", figure.text)
    rounded = {f"{float(number):.2f}" for number in re.findall(r"\d+\.\d+", section)}
    assert found
    assert {*numbers} <= rounded, f"{figure.text} is not what {figure.source} says"


def test_kinds_of_heads_by_their_config(tmp_path: Path) -> None:
    kinds = {
        "block": {"architectures": ["DFlashDraftModel"]},
        "mtp": {"speculators_model_type": "mtp"},
        "medusa": {"medusa_num_heads": 3},
        "eagle": {"architectures": ["LlamaForCausalLMEagle3"]},
    }
    for kind, values in kinds.items():
        (tmp_path / "config.json").write_text(json.dumps(values))
        assert module._kinds_of(tmp_path) == [kind]


def test_another_vocabulary_is_named(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bridge is said with what both have in common; on a GPU it cannot draft."""
    write_model(tmp_path, special=("<|end|>", "<|im_start|>", "<|im_end|>", "<|more|>"))
    monkeypatch.setattr(module, "_problem", lambda made, target, device: None)
    target = read_target(tiny, config=EngineConfig())
    words = f"model:{tmp_path}"
    made = module._judged(words, "here", target, "cpu")
    assert "another vocabulary, 256 tokens in common" in made.needs
    assert made.vocabulary is not None
    assert made.vocabulary < 1
    monkeypatch.undo()
    sizes: Any = SimpleNamespace(parts=[SimpleNamespace(parameters=9)])
    small: Any = SimpleNamespace(model=SimpleNamespace(parts=[]), on_device=None)
    assert "run on a CPU only" in str(module._problem(small, sizes, "cuda"))
    assert module._problem(small, sizes, "cpu") is None
    head: Any = SimpleNamespace(model=None, on_device=None)  # its recipe is that beside a CPU: only headers are read
    assert module._problem(head, sizes, "cuda") is None
