"""The table of drafters: which runs there are, that they go on, and what is written."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peers import drafters
from peers.drafters import Run, main, missing, options, page, records, runs, shown, table, without_folders, work

CELL = {
    "ratio": 1.5,
    "ratio_interval": [1.2, 1.8],
    "tokens_per_step": 2.25,
    "acceptance": 0.5,
    "acceptance_by_position": [0.9, 0.5],
    "speculative_ms_per_step": {"draft": 1.25},
    "identical": 2,
    "prompts": 2,
}
MARKS = "a\n<!-- drafters: begin -->\nold\n<!-- drafters: end -->\nb\n"


def measured(run: Run, args: Namespace) -> list[dict[str, Any]]:
    found = {"cells": [{**CELL, "drafter": name} for name in run.cells], "drafters": {"eagle": "a head"}}
    return records(run, found)


def test_all_runs() -> None:
    usual = list(runs(options([])))
    assert {run.target for run in usual} == {"smollm2"}
    assert len(usual) == 2 * len(drafters.SETS) * len(drafters.FORMATS)
    assert usual[0].cells == {"eagle": "eagle:smollm2", "suffix": "suffix", "ngram": "ngram", "portfolio": "portfolio"}
    pair = list(runs(options(["--qwen", "big.gguf", "--sibling", "small.gguf", "--sets", "gsm8k"])))
    assert {run.drafters for run in pair if run.target == "big.gguf"} == {
        ("model:small.gguf",),
        ("model:smollm2",),
        ("suffix", "ngram", "recycling", "lookahead", "layers:auto"),
        ("suffix", "ngram", "recycling", "lookahead", "layers:auto", "self:int4"),
    }
    assert {run.rounds for run in pair if run.target == "big.gguf"} == {1}
    [beside] = [run for run in usual if run.format == "int8" and run.set == "gsm8k" and not run.portfolio]
    assert list(beside.cells) == ["recycling", "lookahead", "layers", "self"]
    argv = pair[2].argv(options(["--data", "sets"]))
    assert argv[:6] == ["bench", "offline", "big.gguf", "--format", "auto", "--drafter"]
    assert argv[argv.index("--data") + 1] == "sets"


def test_it_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cells.jsonl"
    args = options(["--save", str(file), "--sets", "gsm8k", "mt_bench", "--minutes", "1e-9"])
    assert work(args, measure=measured) == 0
    assert "8 runs are left" in capsys.readouterr().err
    args.minutes, done = None, []

    def once(run: Run, args: Namespace) -> list[dict[str, Any]]:
        if done:
            raise KeyboardInterrupt
        done.append(run)
        return measured(run, args)

    with pytest.raises(KeyboardInterrupt):
        work(args, measure=once)
    assert missing(list(runs(args)), drafters.read(file)) == list(runs(args))[1:]
    assert work(args, measure=measured) == 0
    assert missing(list(runs(args)), drafters.read(file)) == []
    assert len(drafters.read(file)) == 4 * 4 + 2 * 3 + 2 * 4


def test_a_run_that_fails_leaves_the_others(tmp_path: Path) -> None:
    def fails(run: Run, args: Namespace) -> list[dict[str, Any]]:
        raise ValueError("status 2")

    args = options(["--save", str(tmp_path / "cells.jsonl"), "--sets", "gsm8k"])
    assert work(args, measure=fails) == 4


def test_one_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    run, args = next(runs(options([]))), options([])
    answer = SimpleNamespace(
        returncode=0, stdout="table\n" + json.dumps({"cells": [{"drafter": "ngram"}], "drafters": {}})
    )
    monkeypatch.setattr(drafters.subprocess, "run", lambda *_, **__: answer)
    [found] = drafters.measure(run, args)
    assert (found["drafter"], found["set"], found["format"]) == ("ngram", "mt_bench", "auto")
    answer.returncode = 2
    with pytest.raises(ValueError, match="status 2"):
        drafters.measure(run, args)
    answer.returncode = 130
    with pytest.raises(KeyboardInterrupt):
        drafters.measure(run, args)


def test_the_table(tmp_path: Path) -> None:
    cells = measured(next(runs(options([]))), options([]))
    made = page(MARKS, cells)
    line = "| smollm2 | auto | `ngram` | mt_bench | 2.25 | 50% | 0.90 0.50 | 1.25 | 1.500 [1.200, 1.800] | 2/2 |"
    assert line in made
    assert "old" not in made
    assert made.startswith("a\n")
    assert made.endswith("b\n")
    assert page(made, []) == page(MARKS, [])
    assert table([]) == "No results are stored yet.\n"
    with pytest.raises(SystemExit, match="has no `<!-- drafters: begin -->`"):
        page("no marks", cells)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    write = tmp_path / "page.md"
    write.write_text(MARKS)
    argv = ["--save", str(tmp_path / "cells.jsonl"), "--write", str(write), "--sets", "gsm8k"]
    assert main([*argv, "--list"]) == 0
    assert capsys.readouterr().out.count("paceline bench offline smollm2") == 4
    assert main([*argv, "--page"]) == 0
    assert "No results" in write.read_text()
    monkeypatch.setattr(drafters, "work", lambda args: 1)
    assert main(argv) == 1
    with pytest.raises(SystemExit, match="--minutes must be above 0"):
        main([*argv, "--minutes", "0"])

    def stopped(args: Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(drafters, "work", stopped)
    assert main(argv) == 130
    assert "the same command goes on" in capsys.readouterr().err


def test_names_without_folders(tmp_path: Path) -> None:
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    assert shown(f"model:{tmp_path / 'small.gguf'}") == "model:small"
    assert shown("eagle:smollm2") == "eagle:smollm2"


def test_reasons_without_folders(tmp_path: Path) -> None:
    big, small = (tmp_path / name for name in ("big.gguf", "small.gguf"))
    for path in (big, small):
        path.write_bytes(b"GGUF")
    run = Run(str(big), (f"model:{small}", "suffix"), "auto", "gsm8k")
    said = f"suffix drafts nothing for {big}, and {small} little"
    assert without_folders(said, run) == "suffix drafts nothing for big, and small little"
