"""Results of a comparison with peers: a file of JSON lines that grows with every measurement.

The first line has the machine, the versions and the plan; each other line is one measurement, or the reason why a mode
could not be measured. A comparison that was killed can be resumed from its file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Measurement:
    """One mode on the prompts of one cell; `tokens` and `digests` have an entry per prompt."""

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
    elsewhere_s: float  # CPU seconds of other processes meanwhile, sleeping workers included

    @property
    def speed(self) -> float:
        return sum(self.tokens) / self.seconds

    @property
    def cell(self) -> tuple[str, int, int]:
        return self.set, self.at_once, self.round


@dataclass(slots=True)
class Results:
    about: dict[str, Any]
    measurements: list[Measurement]
    failures: dict[str, str]  # mode → reason why it could not be measured
    path: Path | None = None

    def add(self, measurement: Measurement) -> None:
        self.measurements.append(measurement)
        self._write({"run": asdict(measurement)})

    def fail(self, mode: str, why: str) -> None:
        self.failures[mode] = why
        self._write({"failed": mode, "why": why})

    def has(self, mode: str, cell: tuple[str, int, int]) -> bool:
        return any(one.mode == mode and one.cell == cell for one in self.measurements)

    def _write(self, line: dict[str, Any]) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def create_results(path: Path | None, about: dict[str, Any]) -> Results:
    results = Results(about, [], {}, path)
    if path is not None:
        if path.exists():
            raise SystemExit(f"{path} exists: go on with it by --resume, or name another file")
        results._write({"about": about})
    return results


def resume_results(path: Path, about: dict[str, Any]) -> Results:
    """Continue the file of an earlier comparison with the same plan and commit. Modes that failed are tried again."""
    results = read_results(path)
    if results.about["plan"] != about["plan"]:
        raise SystemExit(f"{path} has the plan {results.about['plan']}; give the same options, or name another file")
    if results.about["machine"]["commit"] != about["machine"]["commit"]:
        raise SystemExit(f"{path} was measured at commit {results.about['machine']['commit']}; begin a new file")
    path.write_text("".join(whole_lines(path)), encoding="utf-8")
    return Results(results.about, results.measurements, {}, path)


def read_results(path: Path) -> Results:
    lines: list[dict[str, Any]] = [json.loads(line) for line in whole_lines(path)]
    measurements = [Measurement(**line["run"]) for line in lines if "run" in line]
    failures = {line["failed"]: line["why"] for line in lines if "failed" in line}
    return Results(lines[0]["about"], measurements, failures)


def whole_lines(path: Path) -> Iterable[str]:
    """Lines of a file, without a last one that was cut by a kill."""
    return [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
