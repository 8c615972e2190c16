"""The page of benchmarks is what the stored results say, and parts of it come out right."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from peers import page
from peers.agree_report import METRICS, OURS, THEIRS, kept
from peers.page_parts import PARTS
from tests.peers.test_tables import results

ROOT = Path(__file__).parent.parent.parent
MACHINE = {"cpu": "a cpu", "cores": 2, "python": "3.11", "torch": "2.13", "commit": "abc1234"}


def test_the_committed_pages_are_what_the_results_say() -> None:
    assert (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8") == page.benchmarks(page.RESULTS)
    front = (ROOT / "README.md").read_text(encoding="utf-8")
    assert page.readme(front, results=page.RESULTS) == front


def test_every_stored_result_is_on_the_page_and_says_where_it_is_from() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for path in page.RESULTS.glob("*.json*"):
        assert path.name in text or path.suffix == ".jsonl", "the table of drafters has a page of its own"
        assert not re.search(r"/(work|home|tmp|root)/", path.read_text(encoding="utf-8")), (
            f"a path of a machine: {path}"
        )


def test_a_changed_result_changes_the_page_and_check_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "docs" / "results"
    results.mkdir(parents=True)
    for path in page.RESULTS.iterdir():
        (results / path.name).write_bytes(path.read_bytes())
    for name in ("README.md", "docs/benchmarks.md"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    monkeypatch.setattr(page, "ROOT", tmp_path)
    monkeypatch.setattr(page, "RESULTS", results)
    with pytest.raises(SystemExit, match="0"):
        page.main(["--check"])

    changed = json.loads((results / "steps-int8.json").read_text())
    changed["rows_ms"]["1"] = 77.0
    (results / "steps-int8.json").write_text(json.dumps(changed))
    with pytest.raises(SystemExit, match="1"):
        page.main(["--check"])
    assert capsys.readouterr().out == "docs/benchmarks.md: is not what the results say\n"
    with pytest.raises(SystemExit, match="0"):
        page.main([])
    assert "| int8, avx512bf16 | 77.00 |" in (tmp_path / "docs" / "benchmarks.md").read_text()


def test_parts_are_filled_in_and_missing_ones_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"identical": 3, "prompts": 4}))
    assert page.filled("above\n\n{{? peers peers.jsonl}}\n\nbelow\n", results=tmp_path) == "above\n\nbelow\n"
    assert page.filled("{{identical-line a.json}}\n", results=tmp_path).startswith("3 of 4 speculative answers")
    with pytest.raises(SystemExit, match=r"steps: docs/results has no b\.json"):
        page.filled("{{steps a.json b.json}}\n", results=tmp_path)
    with pytest.raises(SystemExit, match="no part is called 'stairs'; there are peers, "):
        page.filled("{{stairs a.json}}\n", results=tmp_path)
    (tmp_path / "readme.md.in").write_text("")
    with pytest.raises(SystemExit, match=r"README\.md has no"):
        page.readme("nothing", results=tmp_path)


def test_generated_prose_is_wrapped_and_tables_are_not() -> None:
    row, words = f"| {'cell ' * 40}|", "word " * 40
    lines = page.wrapped(f"{row}\n\n- {words}\n{words}").splitlines()
    assert lines[0] == row
    assert all(len(line) <= page.COLUMNS for line in lines[1:])
    assert lines[2].startswith("- word")
    assert lines[3].startswith("  word")
    assert lines[4].startswith("word")
    assert " ".join(lines[1:]).split() == ["-", *words.split(), *words.split()]


def test_the_peers_part_has_tables_machine_commit_command_and_what_failed(tmp_path: Path) -> None:
    found = results()
    plan = {"sets": ["chat"], "rounds": 3, "tokens": 50, "counts": {"1": 2, "8": 8}, "slow_counts": {"1": 1, "8": 8}}
    about = {**found.about, "plan": plan, "date": "2026-01-01", "command": "python -m peers.run", "machine": MACHINE}
    lines: list[dict[str, Any]] = [{"about": {**about, "versions": {"x": "x 1.2"}}}]
    lines += [{"run": {name: getattr(run, name) for name in run.__slots__}} for run in found.measurements]
    lines += [{"failed": mode, "why": why} for mode, why in found.failures.items()]
    path = tmp_path / "peers.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = PARTS["peers"]([path])
    assert text.startswith("`python -m peers.run`, 2026-01-01, commit abc1234, a cpu, 2 cores, Python 3.11, torch 2.13")
    for part in (
        "x (x 1.2)",
        "| Ours, drafts | 200.0 (100.0–400.0) | 4/6 |",
        "2.00 (1.00–8.00)",
        "not installed",
        "75%",
    ):
        assert part in text
    assert "| Theirs | 100 |  | 0/1 |" in PARTS["peers-best"]([path])


def test_two_tools_side_by_side(tmp_path: Path) -> None:
    said = dict.fromkeys((*METRICS, "completed", "total_output_tokens", "duration"), 10.0)
    rounds = [
        {"server": "Paceline", OURS: kept(said | {"mean_tpot_ms": ours, "arm": "x"}), THEIRS: kept(said)}
        for ours in (9.0, 10.0, 14.0)
    ]
    path = tmp_path / "agree.json"
    path.write_text(
        json.dumps({"rounds": rounds, "command": "peers.agree", "machine": MACHINE, "versions": {"x": "9"}})
    )
    text = PARTS["agree"]([path])
    row = "| Paceline | TPOT ms, mean | 10.00 (9.00–14.00) | 10.00 (10.00–10.00) | 1.000 (0.900–1.400) |"
    assert row in text
    assert text.endswith("- `agree.json`: `peers.agree`; commit abc1234; a cpu, 2 cores, Python 3.11, torch 2.13, x 9")


def test_loads_and_temperatures(tmp_path: Path) -> None:
    run = {"max_concurrency": 100, "temperature": 1.0, "arm": "on", "output_throughput": 321.04, "completed": 40}
    pair = {"max_concurrency": 100, "temperature": 1.0, "identical_texts": 39, "pairs": 40}
    record = {"runs": [run | {"median_ttft_ms": 12.4, "median_tpot_ms": 3.456}], "comparisons": [pair]}
    path = tmp_path / "serve.json"
    path.write_text(json.dumps(record | {"command": "paceline bench serve", "client_machine": MACHINE}))
    text = PARTS["load"]([path])
    assert "| c100 | 1 | on | 321.0 | 12 | 3.46 | 40 |" in text
    assert "c100, T=1: 39 of 40 texts the same." in text


def test_mixed_batches_of_the_engine(tmp_path: Path) -> None:
    setup = {"target": "smollm2", "drafter": "eagle:smollm2", "acceptance": None, "prompts": ["mt_bench"]}
    modes = {"plain": {"tok_s": 200.0}, "speculative": {"tok_s": 300.0, "tokens_per_step": 2.5}}
    mixed = [{"mode": "speculative", "mix": "json:16", "tok_s": 195.0, "ratio": 0.65}]
    batch = {"batch": 16, **modes, "mixes": mixed, "ratio": 1.5, "same_tokens": "16/16"}
    path = tmp_path / "mix.json"
    path.write_text(json.dumps({"setup": setup, "batches": [batch], "command": "bench", "machine": MACHINE}))
    row = "| SmolLM2 + its shipped head | 16 | 16 with json | speculative | 300 | 195 | 0.650 |"
    assert row in PARTS["mixes"]([path])
    row = "| SmolLM2 + its shipped head | mt_bench | 16 | 200 | 300 | 1.50 | 2.50 | 16/16 |"
    assert row in PARTS["real-text"]([path])


def test_reading_beside_another_system_and_beside_decoding(tmp_path: Path) -> None:
    beside = {"length": 16384, "sequences": 15, "tok_s": 28000.4, "gaps": {"median": 0.04, "p99": 0.0533, "max": 0.06}}
    prompts = [{"count": 16, "length": 2048, "tok_s": 41809.2}]
    record = {"setup": {"target": "llama-3.1-8b"}, "prompts": prompts, "beside": beside}
    mine, other = tmp_path / "reading.json", tmp_path / "other.json"
    mine.write_text(json.dumps(record | {"command": "bench", "machine": MACHINE}))
    other.write_text(json.dumps({"source": "vLLM", "llama-3.1-8b": {"prompts": {"16x2048": 43000}}}))
    text = PARTS["reading"]([mine, other])
    assert "| Llama-3.1-8B | 16 × 2048 | 43000 | 41809 |" in text
    assert "15 sequences decode. Milliseconds between two of their tokens: median 40.0, p99 53.3, longest 60.0." in text


def test_a_program_at_once_and_call_by_call(tmp_path: Path) -> None:
    path = tmp_path / "program.json"
    found = {"runs": 3, "forks": 2, "identical": True, "tokens_per_second": {"together": 20.0, "one by one": 10.0}}
    found |= {"speedup": {"ratio": 2.0, "interval": [1.9, 2.1]}, "command": "bench program", "machine": MACHINE}
    path.write_text(json.dumps(found))
    text = PARTS["program"]([path])
    assert text.startswith("3 runs with 2 forks each: 20.0 tokens a second together, 10.0 one by one: × 2.00")
    assert "`program.json`: `bench program`; commit abc1234" in text


def stored(folder: Path, name: str, **record: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps({"command": "a command", "machine": MACHINE, **record}))
    return path


def test_pairs_in_the_order_of_what_was_predicted(tmp_path: Path) -> None:
    """Of each drafter the best length by prediction counts, whatever was measured best."""
    made = [("a", 2, 1, 1.2), ("a", 4, 1, 1.1), ("suffix", 2, 1, 1.5), ("suffix", 2, 8, 9.0)]
    predictions = [
        {"drafter": d, "draft": k, "batch": b, "ratio": r, "interval": [r - 0.1, r + 0.1], "way": f"{d} k={k}"}
        for d, k, b, r in made
    ]
    cells = [{"way": f"{d} k={k}", "batch": b, "ratio": 1.25 if d == "suffix" else 2.4} for d, k, b, _ in made]
    record = {"target": "big", "sources": ["chats"], "cells": cells, "predictions": predictions}
    text = PARTS["advised"]([stored(tmp_path, "advice.json", **record)])
    rows = [line for line in text.splitlines() if "chats" in line]
    assert rows == [
        "| big | chats | suffix, drafts of 2 | 1.50 [1.40, 1.60] | 1.25 | +20.0% |",
        "| big | chats | a, drafts of 2 | 1.20 [1.10, 1.30] | 2.40 | -50.0% |",
    ]


def test_a_choice_beside_the_grid(tmp_path: Path) -> None:
    def cell(batch: int, drafter: str, draft: int | None, ratio: float) -> dict[str, Any]:
        way = drafter if draft is None else f"{drafter} k={draft}"
        known = {"group": 0, "tok_s": 1.0, "interval": None, "ttft": 1.0, "tpot": 1.0, "void": False}
        return {"batch": batch, "drafter": drafter, "draft": draft, "ratio": ratio, "way": way, **known}

    measured = {1: 1.6, 2: 1.5, 3: 1.4, 4: 1.3}  # by draft length
    cells = [cell(batch, "plain", None, 1.0) for batch in (1, 8)]
    cells += [cell(1, "eagle", k, ratio) for k, ratio in measured.items()] + [cell(8, "eagle", 2, 0.7)]
    predicted = [{"drafter": "eagle", "draft": k, "batch": b, "ratio": k} for k in measured for b in (1, 8)]
    grid = {"sources": ["chats"], "batch": [1, 8], "cells": cells, "predictions": predicted}
    grid |= {"errors": {"close": 9, "cells": 10}, "seconds": {"predictions": 40.0, "checks": 500.0}}
    path = stored(tmp_path, "grid.json", **grid)
    text = PARTS["tuned"]([path, path])
    setting = "eagle k=1 1.26 | 3.2%"  # with max_draft_batch 1
    assert f"| chats | eagle k=2 | 1.50 and 1.00 | {setting} | eagle k=1 1.60, plain 1.00 | 3.2% | 9 of 10 |" in text
    assert "40 to predict; the grid 500" in text
    assert text.count("`grid.json`") == 1


def test_trials_of_a_canary(tmp_path: Path) -> None:
    ends = [("promoted", 50), ("running", 400), ("rolled back", 90)]
    trials = [
        {"kind": "equal", "requests": requests, "changed": 0, "lost": 1, "canary": {"phase": phase}}
        for phase, requests in ends
    ]
    text = PARTS["canary"]([stored(tmp_path, "c.json", trials=trials)])
    assert "| equal | 3 | 1 | 1 | 1 | 50–400, median 90 | 0 | 3 |" in text


def test_a_replay_beside_a_real_one(tmp_path: Path) -> None:
    errors = [{"figure": "TTFT p50, ms", "simulated": 51.3, "real": 54.0, "error": -0.05, "holds": True}]
    text = PARTS["replayed"]([stored(tmp_path, "r.json", errors_against=errors)])
    assert "| TTFT p50, ms | 51.3 | 54.0 | -5.0% |" in text
