from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from tests.audit.models import write_looping, write_pair

PROMPTS = ["How are you?", "The quick brown fox", "abcabcabcabc", "1 2 3 4 5 6 7 8"]


@dataclass(frozen=True)
class Told:
    status: int
    out: str
    err: str

    @property
    def found(self) -> dict[str, Any]:
        """What stands in the last line."""
        found: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return found


Auditor = Callable[..., Told]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models")
    for name in ("target", "drafter", "looping"):
        (place / name).mkdir()
    write_pair(place / "target", place / "drafter")
    write_looping(place / "looping")
    return place


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS), encoding="utf-8")
    return path


@pytest.fixture
def auditor(models: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Auditor]:
    """Runs the command on the target and its drafter, with few answers; later words go before earlier ones."""

    def run(*words: object, target: str = "target") -> Told:
        usual = [models / target, "--prompts", prompts, "--max-tokens", 20, "--at-once", 1, "--json", "--threads", 1]
        if "--drafter" not in words:
            usual += ["--drafter", models / "drafter"]
        if "--format" not in words:
            usual += ["--format", "int8"]  # bitwise
        status = main(["audit", *map(str, (*usual, *words))])
        return Told(status, *capsys.readouterr())

    yield run
    logging.getLogger("paceline").handlers.clear()
