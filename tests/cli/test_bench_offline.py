"""`paceline bench offline` and `bench compare` from the command line to files, with a tiny random model."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.cli.conftest import Cli

TINY = ("--threads", 1, "--device", "cpu", "--max-tokens", 12, "--ignore-eos")
UNHURRIED = ("--no-measure-cost", "--min-acceptance", 0)  # what is drafted does not depend on the clock


@pytest.fixture
def asked(tmp_path: Path) -> str:
    path = tmp_path / "asked.jsonl"
    lines = [{"id": i, "category": "ab"[i % 2], "prompt": "abcabcabcabc" * (1 + i % 3)} for i in range(5)]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return str(path)


def offline(cli: Cli, model: str, *argv: object) -> tuple[str, dict[str, Any]]:
    status, out, err = cli("bench", "offline", model, *TINY, *argv, "--json")
    assert (status, err) == (0, "")
    text, _, last = out.rstrip("\n").rpartition("\n")
    return text, json.loads(last)


def test_the_last_line(cli: Cli, tiny: str, asked: str) -> None:
    argv = ("--drafter", "ngram:min_ngram=1", "--prompts", asked, "--rounds", 2, *UNHURRIED)
    text, found = offline(cli, tiny, *argv)
    assert (found["identical"], found["prompts"]) == (5, 5)
    assert found["ratio"] == pytest.approx(found["speculative_tok_s"] / found["plain_tok_s"])
    low, high = found["ratio_interval"]
    assert low <= found["ratio"] <= high
    [cell] = found["cells"]
    sizes = {int(size): count for size, count in cell["tokens_per_step_counts"].items()}
    assert sum(size * count for size, count in sizes.items()) == cell["output_tokens"] == 5 * 12
    assert found["tokens_per_step"] == pytest.approx(60 / sum(sizes.values()))
    assert found["tokens_per_round"] == found["tokens_per_step"], "the older name"
    assert cell["tokens_per_round_counts"] == cell["tokens_per_step_counts"]
    assert {name: each["prompts"] for name, each in cell["categories"].items()} == {"a": 3, "b": 2}
    assert cell["plain_ms_per_step"]["verify"] > 0
    assert cell["drafted_per_round"] >= 1
    assert "same text" in text
    assert text.endswith(found["conclusion"])
    assert "same text in 5 of 5." in found["conclusion"]


def test_the_grid(cli: Cli, tiny: str, asked: str) -> None:
    grid = ("--batch", "1,3", "--draft", "1,40", "--temperature", "0,1", "--rounds", 1, "--fixed-draft")
    argv = ("--drafter", "ngram:min_ngram=1", "--prompts", asked, *grid, *UNHURRIED)
    _, found = offline(cli, tiny, *argv)
    cells = found["cells"]
    assert [(c["batch"], c["temperature"], c["max_draft"]) for c in cells] == [
        (batch, temperature, draft) for batch in (1, 3) for temperature in (0, 1) for draft in (1, 40)
    ]
    assert all(cell["identical"] == cell["prompts"] == 5 for cell in cells)
    assert all(len(cell["acceptance_by_position"]) <= 1 for cell in cells if cell["max_draft"] == 1)
    assert max(cell["drafted_per_round"] or 0 for cell in cells) > 4  # the engine's own limit made way
    assert [len(cell["unit_plain"]) for cell in cells] == [5] * 4 + [2] * 4
    assert "ratio" in cells[0]["categories"]["a"]
    assert "ratio" not in cells[-1]["categories"]["a"]  # of a batch of both


def test_made_up_prompts_are_exactly_as_long(cli: Cli, tiny: str) -> None:
    argv = ("--drafter", "ngram", "--prompts", "random", "--input-tokens", 40, "--count", 2, "--rounds", 1)
    _, found = offline(cli, tiny, *argv)
    assert found["prompts"] == 2


def test_what_does_not_fit_is_left_out(cli: Cli, tiny: str, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("short\n" + "long " * 60 + "\n", encoding="utf-8")
    argv = ("bench", "offline", tiny, *TINY, "--drafter", "ngram", "--prompts", tmp_path / "p.txt", "--rounds", 1)
    status, out, err = cli(*argv, "--json")
    assert status == 0
    assert "1 of 2 prompts are too long" in err
    assert json.loads(out.splitlines()[-1])["left_out"] == 1
    status, _, err = cli(*argv, "--max-tokens", 250)
    assert status == 2
    assert "no prompt leaves room for an answer of 250 tokens" in err


def test_no_drafter(cli: Cli, tiny: str, asked: str) -> None:
    status, _, err = cli("bench", "offline", tiny, *TINY, "--drafter", "none", "--prompts", asked)
    assert status == 2
    assert "name a --drafter" in err


def test_two_results_and_their_pictures(cli: Cli, tiny: str, asked: str, tmp_path: Path) -> None:
    saved = tmp_path / "a.json"
    argv = ("--drafter", "ngram:min_ngram=1", "--prompts", asked, "--rounds", 1, "--save", saved)
    _, found = offline(cli, tiny, *argv, "--html", tmp_path / "a.html", "--plots", tmp_path / "plots")
    assert json.loads(saved.read_text()) == found
    stands_alone((tmp_path / "a.html").read_text())
    plots = {path.stem for path in (tmp_path / "plots").glob("*.svg")}
    assert plots >= {"speed", "ratio", "rounds", "parts", "category"}
    for cell in found["cells"]:
        cell["unit_speculative"] = [[tokens, seconds * 2] for tokens, seconds in cell["unit_speculative"]]
        cell["speculative_tok_s"] /= 2
    (tmp_path / "b.json").write_text("a line before\n" + json.dumps(found), encoding="utf-8")
    words = ("bench", "compare", saved, tmp_path / "b.json", "--html", tmp_path / "c.html", "--json")
    status, out, _ = cli(*words)
    plain, speculative = json.loads(out.splitlines()[-1])["compared"]
    assert (status, plain["verdict"], speculative["verdict"]) == (0, "no difference shown", "worse")
    assert speculative["ratio"] == pytest.approx(0.5)
    concluded = json.loads(out.splitlines()[-1])["conclusion"]
    assert concluded.startswith("The second result is slower: 0.50 times as fast")
    assert concluded in out.splitlines()[-2]
    assert concluded in (tmp_path / "c.html").read_text()
    assert escape(found["conclusion"]) in (tmp_path / "a.html").read_text()
    stands_alone((tmp_path / "c.html").read_text())
    assert cli(*words, "--max-regression", 40)[0] == 1
    assert cli(*words, "--max-regression", 60)[0] == 0
    assert cli("bench", "compare", tmp_path / "b.json", saved, "--max-regression", 0)[0] == 0  # twice as fast


def stands_alone(page: str) -> None:
    root = ElementTree.fromstring(
        page.removeprefix("<!doctype html>\n")
        .replace("<br>", "<br/>")
        .replace(*META[0])
        .replace(*META[1])
        .replace(" class=word", "")
    )
    tags = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert tags.count("svg") >= 4
    assert not {"script", "link", "img", "iframe"} & set(tags)
    assert not [a for element in root.iter() for a in element.attrib if a in ("src", "href")]


META = [
    ('<meta charset="utf-8">', ""),
    ('<meta name="viewport" content="width=device-width">', ""),
]


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "holds no result of a benchmark"), ("[]", "holds a list"), ("{}", "no result of `bench serve`")],
)
def test_files_that_are_no_results(cli: Cli, tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.json").write_text(content, encoding="utf-8")
    status, _, err = cli("bench", "compare", tmp_path / "a.json", tmp_path / "a.json")
    assert status == 2
    assert message in err


def test_a_place_that_cannot_be_written_is_told_at_once(cli: Cli, tmp_path: Path, asked: str) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    words = ("--prompts", asked, "--save", tmp_path / "file" / "a.json")
    status, _, err = cli("bench", "offline", "no-such-model", *words)
    assert status == 2
    assert "cannot be written" in err
