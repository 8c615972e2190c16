"""Scripts of `paceline completion`, asked as a shell asks them. Shells that are not installed are not asked."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.cli.completion import SCRIPTS
from paceline.cli.main import COMMANDS
from tests.cli.conftest import Cli

LINES = {
    "paceline se": {"serve"},
    "paceline bench off": {"offline"},
    "paceline bench offline --no-m": {"--no-measure-cost", "--no-measure-speedup"},
    "paceline serve smollm2 --max-w": {"--max-waiting"},
    "paceline chat smollm2 --port": set(),
    "paceline run smollm2 --port": {"--port"},
    "paceline bench serve --endpoint c": {"chat", "completions"},
    "paceline completion ": {"bash", "zsh", "fish"},
    "paceline ": set(COMMANDS),
}
ASK_BASH = 'source "$0"; COMP_WORDS=("${@}"); COMP_CWORD=$(($# - 1)); _paceline; printf "%s\\n" "${COMPREPLY[@]}"'


@pytest.fixture
def script(cli: Cli, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The script of the shell that a test needs."""
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    path = tmp_path / request.param
    path.write_text(cli("completion", request.param)[1], encoding="utf-8")
    return path


def asked(*command: object) -> list[str]:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split("\n")[:-1]


@pytest.mark.parametrize("script", ["bash"], indirect=True)
@pytest.mark.parametrize("line", LINES)
def test_bash(script: Path, line: str) -> None:
    assert set(filter(None, asked("bash", "-c", ASK_BASH, script, *line.split(" ")))) == LINES[line]


@pytest.mark.parametrize("script", ["fish"], indirect=True)
@pytest.mark.parametrize("line", [line for line in LINES if LINES[line]])
def test_fish(script: Path, line: str) -> None:
    found = {answer.partition("\t")[0] for answer in asked("fish", "-c", f"source {script}; complete -C '{line}'")}
    assert found == LINES[line]


@pytest.mark.parametrize("script", ["zsh"], indirect=True)
def test_zsh_can_read_its_script(script: Path) -> None:
    asked("zsh", "-n", script)
    text = script.read_text(encoding="utf-8")
    assert "'--max-waiting:sequences that wait" in text
    assert "'offline:prompts on the engine" in text


def test_shells_that_are_not_known(cli: Cli) -> None:
    assert set(SCRIPTS) == {"bash", "zsh", "fish"}
    status, _, err = cli("completion", "csh")
    assert status == 2
    assert "invalid choice: 'csh'" in err
