"""The record of a comparison: a file of JSON lines that grows with every measurement.

The first line says on what, with what and how was measured; each other line is one measurement, or why a mode could
not be measured. A run that was killed is gone on with where it ended.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Run:
    """One mode on the prompts of one cell. `tokens` and `digests` are by prompt."""

    set: str
    at_once: int
    round: int
    mode: str
    prompts: list[str]
    seconds: float
    tokens: list[int]
    digests: list[str]
    drafted: int
    accepted: int
    elsewhere_s: float  # CPU time that other processes used meanwhile, sleeping workers included

    @property
    def speed(self) -> float:
        return sum(self.tokens) / self.seconds

    @property
    def cell(self) -> tuple[str, int, int]:
        return self.set, self.at_once, self.round


@dataclass(slots=True)
class Book:
    about: dict[str, Any]
    runs: list[Run]
    failures: dict[str, str]  # mode → why it could not be measured
    path: Path | None = None

    def add(self, run: Run) -> None:
        self.runs.append(run)
        self._write({"run": asdict(run)})

    def fail(self, mode: str, why: str) -> None:
        self.failures[mode] = why
        self._write({"failed": mode, "why": why})

    def has(self, mode: str, cell: tuple[str, int, int]) -> bool:
        return any(run.mode == mode and run.cell == cell for run in self.runs)

    def _write(self, line: dict[str, Any]) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def begin(path: Path | None, about: dict[str, Any]) -> Book:
    book = Book(about, [], {}, path)
    if path is not None:
        if path.exists():
            raise SystemExit(f"{path} exists: go on with it by --resume, or name another file")
        book._write({"about": about})
    return book


def go_on(path: Path, about: dict[str, Any]) -> Book:
    """With what a file holds. What failed then is tried again."""
    book = read(path)
    if book.about["plan"] != about["plan"]:
        raise SystemExit(f"{path} has the plan {book.about['plan']}; give the same options, or name another file")
    if book.about["machine"]["commit"] != about["machine"]["commit"]:
        raise SystemExit(f"{path} was measured at commit {book.about['machine']['commit']}; begin a new file")
    path.write_text("".join(whole_lines(path)), encoding="utf-8")
    return Book(book.about, book.runs, {}, path)


def read(path: Path) -> Book:
    lines: list[dict[str, Any]] = [json.loads(line) for line in whole_lines(path)]
    runs = [Run(**line["run"]) for line in lines if "run" in line]
    failures = {line["failed"]: line["why"] for line in lines if "failed" in line}
    return Book(lines[0]["about"], runs, failures)


def whole_lines(path: Path) -> Iterable[str]:
    """Without one that was being written when the run was killed."""
    return [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
