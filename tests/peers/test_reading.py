"""Reading beside peers: who is asked what, the table, and the ratio within rounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from peers import reading
from peers.page_parts import PARTS
from tests.peers.test_page import MACHINE
from tests.peers.test_run import pretender

__all__ = ["pretender"]


def runs(*found: tuple[str, int, int, float]) -> dict[str, Any]:
    return {
        "runs": [
            {"mode": mode, "is_peer": "Paceline" not in mode, "round": turn, "length": length, "seconds": seconds}
            for mode, turn, length, seconds in found
        ]
    }


FOUND = runs(
    ("Paceline, plain", 0, 1000, 0.5), ("Paceline, plain", 1, 1000, 1.0),
    ("x, plain", 0, 1000, 2.0), ("x, plain", 1, 1000, 3.0),
    ("y, plain", 0, 1000, 1.5), ("y, plain", 1, 1000, 4.0),
    ("Paceline, plain", 0, 4000, 4.0), ("y, plain", 0, 4000, 8.0),
)  # fmt: skip  # a system a line


def test_ratios_are_taken_within_a_round() -> None:
    assert reading.ratios(FOUND) == {1000: 3.0, 4000: 2.0}
    assert reading.ratios(runs(("Paceline, plain", 0, 1000, 0.5))) == {}


def test_the_table_has_speeds_and_the_first_token_of_the_longest() -> None:
    lines = reading.table(FOUND).splitlines()
    assert [cell.strip() for cell in lines[0].split("|")[1:-1]] == [
        "", "1,000 tokens: tokens/s", "4,000 tokens: tokens/s", "first token of 4,000, s"
    ]  # fmt: skip  # a row
    cells = {row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:-1]] for row in lines[2:]}
    assert cells == {
        "Paceline, plain": ["1,333", "1,000", "4.00"], "x, plain": ["400", "", ""], "y, plain": ["364", "500", "8.00"],
    }  # fmt: skip  # a system each


def test_only_plain_modes_read_and_llamacpp_has_room() -> None:
    modes = reading.reading_modes(Path("models"), only=None)
    assert {mode.system for mode in modes} == {"Paceline", "llama.cpp", "OpenVINO"}
    assert all(mode.plain is None for mode in modes)
    [llama] = [mode for mode in modes if mode.kind == "llama.cpp"]
    assert llama.options["at_once"] * llama.options["context"] > max(reading.LENGTHS)


def test_every_system_reads_each_length_once_a_round(
    pretender: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--peers-python", str(pretender), "--only", "llama", "--only", "OpenVINO", "--rounds", "2"]
    reading.main([*words, "--lengths", "20", "30"])
    found = json.loads(capsys.readouterr().out)
    assert len(found["runs"]) == 3 * 2 * 2
    assert {(run["length"], run["round"], run["seconds"]) for run in found["runs"]} == {
        (length, turn, 2.0) for length in (20, 30) for turn in (0, 1)
    }
    asked = (tmp_path / "log").read_text().splitlines()
    assert len(asked) == 3 * 2 * 3, "a warm-up, and two rounds that count"
    assert all(line.endswith(("[20] 1 1", "[30] 1 1")) for line in asked)


def test_the_page_shows_table_ratio_and_source(tmp_path: Path) -> None:
    record = FOUND | {"command": "python -m peers.reading", "machine": MACHINE, "versions": {"y": "y 1.0"}}
    (tmp_path / "peers-reading.json").write_text(json.dumps(record | {"failures": {"z": "died"}}))
    text = PARTS["peers-reading"]([tmp_path / "peers-reading.json"])
    assert "| Paceline, plain | 1,333 | 1,000 | 4.00 |" in text
    assert "within a round: 3.00 at 1,000 tokens, 2.00 at 4,000 tokens." in text
    assert "commit abc1234" in text
    assert "- z: not measured (died)" in text
