"""The proof with two ranks: what it runs, what it takes for the same, and how it says so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from peers import ranks

CASE = {"drafter": "model", "at_once": 8, "sampling": "T=0", "compared": 4, "identical": 4, "drafted": 9, "accepted": 5}
PLAIN = CASE | {"drafter": None, "drafted": 0, "accepted": 0}
AUDIT = {
    "how": "split over 2 ranks",
    "verdict": "EXACT",
    "passed": True,
    "cases": [CASE | {"compared": 0}, PLAIN, CASE],
}
SERVERS = {
    "requests": 8,
    "answers": 24,
    "tokens": 99,
    "logprobs": True,
    "differences": [],
    "failed": [],
    "passed": True,
}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The words of each server and audit."""
    words: list[list[str]] = []

    @contextmanager
    def server(*given: str) -> Iterator[str]:
        words.append(list(given))
        yield f"http://{len(words)}"

    def audit(given: list[str]) -> dict[str, Any]:
        words.append(given)
        return SERVERS if "--url" in given else AUDIT

    monkeypatch.setattr(ranks, "paceline_server", server)
    monkeypatch.setattr(ranks, "audit", audit)
    monkeypatch.setattr(ranks, "metric", lambda url, name: 7.0)
    return words


def run(path: Path) -> dict[str, Any]:
    with pytest.raises(SystemExit, match="0"):
        ranks.main(["--target", "/models/big.gguf", "--drafter", "/models/small.gguf", "--save", str(path)])
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def test_the_drafter_is_whole_and_split_and_each_degree_has_a_server(told: list[list[str]], tmp_path: Path) -> None:
    record = run(tmp_path / "r.json")
    split = ["--drafter-tensor-parallel" in words for words in told]
    degrees = ["--tensor-parallel" in words for words in told]
    assert (split, degrees) == (
        [False, True, False, False, True, False],
        [True, True, False, True, True, False],
    )
    assert ["--same-bits-across-degrees" in words for words in told] == [False, False, True, True, True, False]
    assert told[-1].count("--url") == 3
    assert "--logprobs" in told[-1]
    assert "/models/" not in json.dumps(record), "a path of this machine"
    assert [len(each["cases"]) for each in record["audits"]] == [2, 2], "cases that were compared"


def test_a_record_is_a_part_of_the_page(told: list[list[str]], tmp_path: Path) -> None:
    run(tmp_path / "r.json")
    page = ranks.ranks([tmp_path / "r.json"])
    assert "| drafter whole | 8 | T=0 | 4 of 4 | 9 | 5 |" in page
    assert "| drafter split | 8 |" in page
    assert "| plain | 8 | T=0 | 4 of 4 | 0 | 0 |" in page
    assert "24 answers with 99 tokens to 8 requests, text, tokens and log-probabilities equal in every bit" in page
    assert "- `r.json`: `python -m peers.ranks --target big.gguf --drafter small.gguf" in page


@pytest.mark.parametrize("where", ["audit", "across", "no drafts", "no drafts across"])
def test_a_difference_fails_and_so_do_missing_drafts(told: list[list[str]], tmp_path: Path, where: str) -> None:
    record = run(tmp_path / "r.json")
    assert ranks.passed(record)
    broken = deepcopy(record)
    if where == "audit":
        broken["audits"][1]["passed"] = False
    elif where == "across":
        broken["across"]["passed"] = False
    elif where == "no drafts":
        broken["audits"][0]["cases"][1]["accepted"] = 0
    else:
        broken["across"]["accepted"] = {"1 rank": 0.0}
    assert not ranks.passed(broken)
