"""The sets that come with Paceline: whole, licensed, and part of the wheel."""

from __future__ import annotations

import gzip
import re
import tomllib
from pathlib import Path

import pytest

from paceline.prompts.files import SETS, SHIPPED, find, read_prompts
from peers.sets import SETS as WORK

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "Makefile",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(ROOT.glob("docs/results/*.in")),
]
COUNTS = {
    "mt_bench": 80,
    "spec_bench": 320,
    "humaneval": 164,
    "gsm8k": 200,
    "code_edit": 150,
    "bfcl": 400,
    "sonnet": 518,
}
MAX_BYTES = 1 << 20
LICENSES = {"Apache License": "Apache-2.0", "Permission is hereby granted": "MIT", "public domain": "public domain"}
SHARE_ALIKE = {"qa", "rag"}  # categories of Spec-Bench from Natural Questions and Wikipedia


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_a_set_loads_and_has_its_licence(name: str, count: int) -> None:
    prompts = read_prompts(name)
    assert len(prompts) == count
    assert len({prompt.id for prompt in prompts}) == count
    text = (SHIPPED / name / "LICENSE").read_text(encoding="utf-8")
    [license] = [license for words, license in LICENSES.items() if words in text]
    row = re.search(rf"^\| `{name}` \| {count}\b.*$", (SHIPPED / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert row is not None, "the notice names every set with its count"
    assert f"| {license} |" in row[0]


def test_what_is_shipped_is_listed_here_and_small() -> None:
    assert {path.name for path in SHIPPED.iterdir() if path.is_dir()} == set(COUNTS) <= set(SETS)
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()) < MAX_BYTES


def test_questions_under_a_share_alike_licence_are_left_out() -> None:
    categories = {prompt.category for prompt in read_prompts("spec_bench")}
    assert {"summarization", "translation", "math_reasoning", "coding"} <= categories
    assert not categories & SHARE_ALIKE


def test_sets_are_part_of_the_wheel() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        patterns = tomllib.load(file)["tool"]["setuptools"]["package-data"]["paceline"]
    packed = {path for pattern in patterns for path in (ROOT / "paceline").glob(pattern)}
    assert {path for path in SHIPPED.rglob("*") if path.is_file()} <= packed


def test_a_set_of_the_data_directory_goes_first(tmp_path: Path) -> None:
    own = tmp_path / "mt_bench" / "question.jsonl.gz"
    own.parent.mkdir()
    own.write_bytes(gzip.compress(b'{"turns": ["mine"]}\n'))
    assert [prompt.text for prompt in read_prompts("mt_bench", data=tmp_path)] == ["mine"]
    assert find("gsm8k", data=tmp_path).is_relative_to(SHIPPED), "a directory without the set hides nothing"


def test_commands_of_the_documents_need_no_other_set() -> None:
    """Every `--prompts`, `--eval` or `--set` of a page that names a set names one that comes with Paceline."""
    texts = [path.read_text(encoding="utf-8") for path in PAGES]
    named = {name for text in texts for name in re.findall(r"--(?:prompts|eval)[ =]+([a-z0-9_]+)(?=[\s`\"]|$)", text)}
    assert len(named & set(SETS)) >= 3
    assert named & set(SETS) <= set(COUNTS)
    assert {source for source, _ in WORK.values()} <= set(COUNTS), "make bench"
    assert not [text for text in texts if "export PACELINE_DATA" in text]
