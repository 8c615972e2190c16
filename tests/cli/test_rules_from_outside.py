"""`--rule` of a rule that another installed package brings: it runs, and where it cannot that is said at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.cli import options
from paceline.cli.main import build_parsers
from paceline.cli.serve import options_of
from paceline.errors import InvalidRequest
from paceline.llm import LLM
from paceline.server.launch import settings_of
from paceline.types import SamplingParams, Speculation
from tests.cli.conftest import Cli
from tests.outside import installed

GREEDY = ("--format", "fp32", "--drafter", "ngram:min_ngram=1", "--temperature", "0", "--max-tokens", "40")
PLAIN = ("abcabcabc", *GREEDY, "--ignore-eos", "--no-measure-cost", "--json")
SOURCE = """
import torch
from paceline.accept import AcceptRule, Outcome, walk

def take_all(given):
    alive, last = walk(given.rows, torch.ones_like(given.rows.tokens, dtype=torch.bool))
    return Outcome(alive=alive, last=last, tokens=given.targets[last])

RULE = AcceptRule(name="gullible", judge=take_all, lossless=False)
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path) -> Iterator[None]:
    offers = {"gullible": "gullible_rules:RULE", "broken": "gullible_rules:MISSING"}
    with installed(tmp_path, "gullible_rules", SOURCE, offers):
        yield


def test_it_decides(cli: Cli, tiny: str) -> None:
    status, out, _ = cli("generate", tiny, *PLAIN, "--rule", "gullible")
    assert status == 0
    stats = json.loads(out)["stats"]
    assert stats["accepted"] == stats["drafted"] > 5


def test_others_are_not_touched_by_it(cli: Cli, tiny: str) -> None:
    texts = []
    for flags in (["--no-speculation"], [], ["--rule", "block"]):
        _, out, _ = cli("generate", tiny, *PLAIN, *flags)
        texts.append(json.loads(out)["text"])
    assert len(set(texts)) == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gulible", "unknown rule 'gulible'; did you mean 'gullible'?"),
        ("broken", "the rule 'broken' of another package cannot be loaded"),
    ],
)
def test_an_unknown_or_broken_one(name: str, said: str, cli: Cli, tiny: str) -> None:
    status, out, err = cli("generate", tiny, *PLAIN, "--rule", name)
    assert (status, out) == (2, "")
    assert said in " ".join(err.split())


def refuse_to_read(*args: object, **more: object) -> None:
    raise AssertionError("nothing may be read")


@pytest.mark.parametrize("command", ["generate", "audit"])
def test_on_a_gpu_it_is_refused_before_weights_are_read(
    command: str, cli: Cli, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.runner.loading.models.choose_device", lambda name: "cuda")
    monkeypatch.setattr("paceline.llm.LLM", refuse_to_read)
    (tmp_path / "prompts.txt").write_text('"one"\n', encoding="utf-8")
    prompts = ["--prompts", tmp_path / "prompts.txt", "--raw"] if command == "audit" else ["one"]
    status, out, err = cli(command, tiny, *prompts, "--device", "cuda", "--rule", "gullible")
    assert (status, out) == (2, "")
    assert "the rule 'gullible' does not run on cuda: its AcceptRule.devices names only cpu" in err


def test_so_it_is_for_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def settings(device: str) -> object:
        argv = ["serve", "--device", device, "--allowed-rules", "coupled", "--allowed-rules", "gullible"]
        return settings_of(options_of(build_parsers()[0].parse_args(argv), {}))

    monkeypatch.setattr("paceline.runner.loading.models.choose_device", lambda name: name)
    assert settings("cpu").allowed_rules == ("coupled", "gullible")  # type: ignore[attr-defined]
    with pytest.raises(InvalidRequest, match="'gullible' does not run on cuda"):
        settings("cuda")


def test_so_it_is_for_a_request_in_python(tiny: str) -> None:
    llm = LLM(tiny, drafter="ngram", format="fp32")
    [answer] = llm.generate("ab", SamplingParams(max_tokens=4), speculation=Speculation(rule="gullible"))
    assert len(answer.tokens) == 4
    llm._device = "cuda"  # as if
    with pytest.raises(InvalidRequest, match="'gullible' does not run on cuda"):
        llm.generate("ab", SamplingParams(max_tokens=4), speculation=Speculation(rule="gullible"))


def test_a_command_without_rules_has_none_to_check() -> None:
    assert options._rules(build_parsers()[0].parse_args(["serve"])) == []
