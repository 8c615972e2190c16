"""The command itself: what it takes, what it writes, and what it says to bad input."""

from __future__ import annotations

import json
import signal
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from paceline import progress
from paceline.audit import run
from paceline.cli.main import main
from paceline.progress import Progress
from tests.audit import planted
from tests.audit.conftest import Auditor

SHORT = ("--rule", "coupled", "--temperature", 0, "--no-edits", "--max-tokens", 12)


class Collector(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_one_file_that_shows_everything(
    auditor: Auditor, tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted.accepts_one_too_many(monkeypatch)
    records = [{"id": "<script>alert(1)</script>", "prompt": "abcabcabc"}, {"id": "b", "prompt": "hello"}]
    given = tmp_path / "given.jsonl"
    given.write_text("".join(json.dumps(record) + "\n" for record in records))
    told = auditor(*SHORT, "--prompts", given, "--html", tmp_path / "audit.html")
    page = Collector()
    page.feed((tmp_path / "audit.html").read_text(encoding="utf-8"))
    assert told.found["verdict"] in page.text
    assert "structural" in page.text
    assert "<script>alert(1)</script>" in page.text  # as text
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.tags}
    assert not any("src" in attributes or "href" in attributes for _, attributes in page.tags)


def test_recorded_requests_are_replayed(auditor: Auditor, tmp_path: Path) -> None:
    given = tmp_path / "served.jsonl"
    lines = [
        {
            "id": f"req-{i}",
            "prompt_tokens": [40 + i, 60, 50, 41],
            "sampling": {"temperature": i, "seed": i, "max_tokens": 9},
        }
        for i in range(2)
    ]
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = auditor("--prompts", given, "--rule", "coupled").found
    assert (found["prompts"], found["identical"]) == (2, 2)
    assert {case["sampling"] for case in found["cases"]} == {"recorded"}


def test_prompts_without_a_template_and_too_long_ones(auditor: Auditor, tmp_path: Path) -> None:
    given = tmp_path / "long.txt"
    given.write_text(f"short\n{'x' * 300}\n")
    told = auditor("--prompts", given, "--raw", *SHORT)
    assert told.status == 0
    assert (told.found["prompts"], told.found["left_out"]) == (1, 1)
    assert "1 of 2 prompts do not fit" in told.err


def test_float_weights_have_a_bound(auditor: Auditor) -> None:
    told = auditor("--format", "fp32", *SHORT)
    assert told.status == 0
    assert not told.found["bitwise"]
    assert "float32: a gap of up to" in told.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompts", "no-such-file"], "no prompts at no-such-file"),
        (["--prompts", "train_prompts"], "set PACELINE_DATA or pass --data DIR"),
        (["--temperature", "hot"], "numbers such as 0,0.7,1"),
        (["--temperature", "-1"], "numbers from 0 on"),
        (["--temperature", "0,101"], "temperature must be in [0, 100]"),
        (["--temperature", "1,0,1.0"], "a number stands twice in '1,0,1.0'"),
        (["--at-once", "0"], "a whole number from 1 on"),
        (["--samples", "-3"], "a whole number from 0 on"),
        (["--rule", "strict"], "unknown rule 'strict'"),
        (["--drafter", "ngram:nonsense=1"], "nonsense"),
    ],
)
def test_bad_input(auditor: Auditor, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_DATA", raising=False)
    told = auditor(*words)
    assert told.status == 2
    assert message in told.err
    assert told.out == ""


def test_prompts_are_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "model"]) == 2
    assert "--prompts" in capsys.readouterr().err


def test_a_place_that_cannot_be_written(auditor: Auditor, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    told = auditor(*SHORT, "--html", tmp_path / "file" / "audit.html")
    assert told.status == 2
    assert "choose another place" in told.err


def test_a_quick_audit_says_what_it_leaves_out(auditor: Auditor, tmp_path: Path) -> None:
    given = tmp_path / "many.txt"
    given.write_text("".join(f"question {i}\n" for i in range(9)))
    told = auditor("--prompts", given, "--quick", "--temperature", 0, "--no-edits", "--html", tmp_path / "a.html")
    left_out = "prompts beyond 6, answers beyond 20 tokens, the rules rejection and block, distribution tests"
    assert told.status == 0
    assert told.found["prompts"] == 6
    assert {case["rule"] for case in told.found["cases"]} == {None, "coupled"}
    assert told.found["not_audited"] == f"--quick leaves out: {left_out}"
    assert told.found["not_audited"] in told.out.splitlines()[-4]
    assert left_out in (tmp_path / "a.html").read_text()
    assert auditor(*SHORT).found["not_audited"] is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_audit_reports_what_is_complete(
    auditor: Auditor, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    replayed: list[int] = []

    def replay(*args: Any, **options: Any) -> Any:
        replayed.append(1)
        if len(replayed) == 3:
            signal.raise_signal(number)
        return real(*args, **options)

    real = run.replay
    monkeypatch.setattr(run, "replay", replay)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    told = auditor("--rule", "coupled", "--rule", "block", "--temperature", 0, "--no-edits")
    signal.signal(signal.SIGINT, before)
    assert told.status == 128 + number
    assert told.found["interrupted"]
    assert told.found["verdict"].startswith("INTERRUPTED, so far EXACT: 4 of 4 answers")


def test_an_audit_that_is_interrupted_at_once_has_no_report(auditor: Auditor, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "replay", stop)
    assert auditor(*SHORT).out == ""


def test_every_part_and_answer_of_an_audit_is_counted(auditor: Auditor, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, int, int]] = []

    class Noted(Progress):
        def count(self) -> None:
            super().count()
            shown.append((self.doing, self.done, self.total))

    monkeypatch.setattr(progress, "Progress", Noted)
    auditor(*SHORT)
    first, second = "replaying 1/2, plain, alone", "replaying 2/2, model, coupled, alone"
    assert shown == [(part, i, 4) for part in (first, second) for i in range(1, 5)]
