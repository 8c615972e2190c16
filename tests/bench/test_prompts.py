from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from bench.prompts import SETS, Prompt, load


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize(
    ("name", "record", "expected"),
    [
        ("spec_bench", {"question_id": 81, "category": "qa", "turns": ["one", "two"]}, Prompt("81", "qa", "one")),
        ("mt_bench", {"question_id": 7, "category": "math", "turns": ["one"]}, Prompt("7", "math", "one")),
        ("humaneval", {"task_id": "HumanEval/0", "prompt": "def f"}, Prompt("HumanEval/0", "humaneval", "def f")),
        ("gsm8k", {"question": "2 + 2?", "answer": "4"}, Prompt("gsm8k/1", "gsm8k", "2 + 2?")),
        ("code_edit", {"id": "a", "edit": "log", "prompt": "change é"}, Prompt("a", "log", "change é")),
    ],
)
def test_every_named_set_is_read_from_the_data_directory(
    tmp_path: Path, name: str, record: dict[str, Any], expected: Prompt
) -> None:
    write(tmp_path / SETS[name], record)
    assert load(name, data=tmp_path) == [expected]


def test_a_text_file_is_one_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("first\n\n  second \n")
    assert load(str(path)) == [Prompt("mine/1", "mine", "first"), Prompt("mine/3", "mine", "  second ")]


def test_a_count_is_spread_over_the_whole_set(tmp_path: Path) -> None:
    path = write(tmp_path / "many.jsonl", *({"id": str(i), "prompt": "x"} for i in range(10)))
    assert [prompt.id for prompt in load(str(path), count=3)] == ["0", "3", "6"]
    assert len(load(str(path), count=10)) == 10


@pytest.mark.parametrize("count", [0, -1, 2])
def test_an_impossible_count_is_refused(tmp_path: Path, count: int) -> None:
    path = write(tmp_path / "one.jsonl", {"prompt": "x"})
    with pytest.raises(ValueError, match="there are 1"):
        load(str(path), count=count)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "expected an object, found list"),
        ('{"text": "x"}', "found text"),
        ('{"turns": []}', "found turns"),
        ('{"prompt": ""}', "no text"),
        ('{"prompt": null}', "no text"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(ValueError, match=message):
        load(str(path))


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no prompts"):
        load(str(path))


def test_what_is_missing_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="PACELINE_DATA"):
        load("gsm8k")
    with pytest.raises(FileNotFoundError, match="must hold gsm8k/test_first200"):
        load("gsm8k", data=tmp_path)
    with pytest.raises(FileNotFoundError, match="one of the sets spec_bench"):
        load("gsm9k", data=tmp_path)
