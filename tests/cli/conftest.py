from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.cli.main import main
from tests.cli.tiny_model import write_model
from tests.models.hub.conftest import home as home
from tests.models.hub.conftest import hub as hub

Outcome = tuple[int, str, str]
Cli = Callable[..., Outcome]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a tiny random model with a tokenizer and a chat template."""
    return str(write_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Cli]:
    """Runs a command line in this process: exit status, stdout, stderr. However slow the machine is, no progress."""
    monkeypatch.setattr("paceline.progress.LOG_SECONDS", 1e6)

    def run(*argv: object) -> Outcome:
        status = main([str(word) for word in argv])
        return status, *capsys.readouterr()

    yield run
    logging.getLogger("paceline").handlers.clear()


@pytest.fixture
def prompts(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "prompts.txt"
        path.write_text(text, encoding="utf-8")
        return path

    return write
