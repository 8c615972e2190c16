"""Long work is never silent: a line on a terminal, lines in the log elsewhere, also while nothing is reported."""

from __future__ import annotations

import io
import logging
import threading

import pytest

from paceline import progress
from paceline.progress import CLEAR_LINE, Progress, progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_says_what_how_much_and_how_long() -> None:
    now = [100.0]
    work = Progress("loading tiny", clock=lambda: now[0])
    assert work.line() == "loading tiny: 0 s"
    work(1 << 20, 4 << 20)
    now[0] = 110.0
    assert work.line() == "loading tiny:  25% of 4 MiB · 10 s, about 30 s left"
    assert work.line(bar=True).startswith("loading tiny ███████░░░")
    work(4 << 20, 4 << 20)
    assert work.line() == "loading tiny: 100% of 4 MiB · 10 s"
    work(0, 8 << 20)  # the drafter's file
    assert work.line() == "loading tiny:   0% of 8 MiB · 0 s"


def test_phases_count_anew() -> None:
    now = [0.0]
    work = Progress("reading", clock=lambda: now[0])
    now[0] = 5000.0
    work.phase("ngram, coupled", unit="answers", total=3)
    work.count()
    work.note = "12 tokens/s"
    now[0] = 5100.0
    assert work.line() == "ngram, coupled: 1 of 3 answers · 12 tokens/s · 2 min, about 3 min left"
    work.phase("measuring", unit="batches")
    work.count()
    assert work.line() == "measuring: 1 batches · 0 s"


def test_without_a_terminal_lines_appear_though_nothing_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.001)
    monkeypatch.setattr("sys.stderr", io.StringIO())
    logged = threading.Event()
    caplog.handler.addFilter(lambda record: logged.set() or True)
    monkeypatch.setattr(logging.getLogger("paceline"), "level", logging.WARNING)  # as commands set it
    with progress_bar("packing"):
        assert logged.wait(60)
    assert caplog.messages[0].startswith("packing: 0 s")
    before = len(caplog.messages)
    threading.Event().wait(0.01)
    assert len(caplog.messages) == before, "nothing is said after the end"


def test_short_work_says_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("sys.stderr", stream := io.StringIO())
    with progress_bar("loading tiny") as work:
        work(1, 2)
    assert not caplog.messages
    assert stream.getvalue() == ""


def test_a_narrow_terminal_has_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr("sys.stderr", stream := Terminal())
    with progress_bar("loading " + "x" * 100):
        pass
    assert max(map(len, stream.getvalue().split(CLEAR_LINE))) == 19


def test_a_terminal_has_one_line_and_is_left_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DRAW_SECONDS", 0.001)
    monkeypatch.setattr("sys.stderr", stream := Terminal())
    with progress_bar("loading tiny") as work:
        work(1, 2)
        while "50%" not in stream.getvalue():
            pass
    assert "\n" not in stream.getvalue()
    assert stream.getvalue().endswith(CLEAR_LINE)
