from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from paceline.errors import InvalidRequest
from paceline.train.prompts import Prompt, read_prompts, sources


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"prompt": "a b"}', "a b"),
        ('{"question": "why?", "answer": "so"}', "why?"),
        ('{"turns": ["first", "second"], "question_id": 3}', "first"),
        ('{"text": "words"}', "words"),
    ],
)
def test_the_prompt_is_found_under_the_usual_names(tmp_path: Path, line: str, text: str) -> None:
    (tmp_path / "p.jsonl").write_text(f"{line}\n\n", encoding="utf-8")
    assert [prompt.text for prompt in read_prompts(tmp_path / "p.jsonl")] == [text]


def test_text_files_have_one_prompt_a_line(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one\n\ntwo {\n", encoding="utf-8")
    assert [prompt.text for prompt in read_prompts(tmp_path / "p.txt")] == ["one", "two {"]


def test_sources_and_licences_are_counted(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "p.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write('{"prompt": "a", "source": "s", "license": "MIT"}\n' * 2 + '{"prompt": "b"}\n')
    assert sources(read_prompts(tmp_path / "p.jsonl.gz")) == [("s", "MIT", 2), ("p.jsonl.gz", "unknown", 1)]
    assert sources([Prompt("x")]) == [("unknown", "unknown", 1)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": ', "not JSON"),
        ('["prompt"]', "holds list"),
        ('{"answer": "b"}', "found answer"),
        ('{"prompt": 7}', "no text"),
        ('{"prompt": "  "}', "no text"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "p.jsonl").write_text(f'{{"prompt": "fine"}}\n\n{line}\n', encoding="utf-8")
    with pytest.raises(InvalidRequest, match=rf"p\.jsonl:3: .*{said}"):
        read_prompts(tmp_path / "p.jsonl")


def test_a_truncated_file_is_an_error_not_fewer_prompts(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"prompt": "some words"}\n' * 500)
    (tmp_path / "p.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_prompts(tmp_path / "p.jsonl.gz")


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_a_file_without_prompts_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "p.jsonl").write_bytes(content)
    with pytest.raises(InvalidRequest, match="holds no prompts"):
        read_prompts(tmp_path / "p.jsonl")


def test_a_missing_file_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_prompts(tmp_path / "none.jsonl")
