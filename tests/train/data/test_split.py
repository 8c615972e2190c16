from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from paceline.errors import InvalidRequest
from paceline.prompts.files import Prompt
from paceline.train.data.split import Split, read_prompts, read_texts


def test_sources_and_licences_are_counted(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "p.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write('{"prompt": "a", "source": "s", "license": "MIT"}\n' * 2 + '{"prompt": "b"}\n')
    assert Split([], trained=read_prompts(tmp_path / "p.jsonl.gz"), left_out=0).sources == [
        ("s", "MIT", 2),
        ("p.jsonl.gz", "unknown", 1),
    ]
    assert Split([], trained=[Prompt("1", "qa")], left_out=0).sources == [("unknown", "unknown", 1)]


def test_texts_are_all_turns(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"turns": ["one", "two"]}\n{"prompt": "three"}\n', encoding="utf-8")
    assert read_texts(tmp_path / "p.jsonl") == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": ', "not JSON"),
        ('{"answer": "b"}', "found answer"),
        ('{"prompt_tokens": [1, 2]}', "the tokens of a recorded request"),
        (
            '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}',
            "messages before the user's",
        ),
    ],
)
def test_a_line_that_cannot_be_trained_on_is_named(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "p.jsonl").write_text(f'{{"prompt": "fine"}}\n\n{line}\n', encoding="utf-8")
    with pytest.raises(InvalidRequest, match=rf"p\.jsonl:3: .*{said}"):
        read_prompts(tmp_path / "p.jsonl")


def test_a_missing_file_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_prompts(tmp_path / "none.jsonl")
