"""How the command line is left: help without torch, errors in one line, exit codes."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys

import pytest

from paceline import __version__
from paceline.cli import inspect
from paceline.cli.main import COMMANDS, main
from paceline.errors import EngineDead, TrainingError
from tests.cli.conftest import Cli

HELP_WITHOUT_TORCH = """
import sys
from paceline.cli.main import main
try:
    main({argv!r})
except SystemExit as left:
    assert not left.code, left.code
print("torch" in sys.modules)
"""


@pytest.mark.parametrize("argv", [["--help"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_help_does_not_wait_for_torch(argv: list[str]) -> None:
    code = HELP_WITHOUT_TORCH.format(argv=argv)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: paceline")
    assert done.stdout.endswith("False\n")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"paceline {__version__}\n"


def test_without_a_command_help_is_shown(cli: Cli) -> None:
    status, out, err = cli()
    assert status == 0
    assert all(name in out for name in COMMANDS)
    assert err == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["generat"], "unknown command 'generat'; did you mean 'generate'?"),
        (["generate", "m", "p", "--temprature", "1"], "unknown option '--temprature'; did you mean '--temperature'?"),
        (["generate", "m", "p", "--temprature=1"], "unknown option '--temprature'; did you mean '--temperature'?"),
        (["chat", "m", "--xyzzy"], "unknown option '--xyzzy'; see `paceline chat --help`"),
        (["inspect", "m", "n"], "unexpected argument 'n'; see `paceline inspect --help`"),
        (["generate"], "the following arguments are required: MODEL, PROMPT; see `paceline generate --help`"),
        (["generate", "m", "p", "--max-tok", "1"], "unknown option '--max-tok'; did you mean '--max-tokens'?"),
        (["generate", "m", "p", "--top-k", "many"], "argument --top-k: invalid int value: 'many'"),
        (["generate", "m", "p", "--threads", "0"], "a whole number from 1 on is needed, not '0'"),
        (["generate", "m", "p", "--kv-memory", "lots"], "a size such as 512M or 2G is needed, not 'lots'"),
        (["generate", "m", "p", "--logit-bias", "a=1"], "'a' is not a number"),
        (["generate", "no-such-model", "p"], "no model 'no-such-model'"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_2(cli: Cli, argv: list[str], message: str) -> None:
    status, out, err = cli(*argv)
    assert status == 2
    assert out == ""
    assert err.startswith("paceline: error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (EngineDead("it broke\nhere"), (1, "paceline: error: it broke here\n")),
        (TrainingError("no number"), (1, "paceline: error: no number\n")),
        (KeyboardInterrupt(), (130, "")),
    ],
)
def test_failed_and_interrupted_runs(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, error: BaseException, expected: tuple[int, str]
) -> None:
    def fail(args: object) -> int:
        raise error

    monkeypatch.setattr(inspect, "run", fail)
    status, out, err = cli("inspect", "m")
    assert (status, err) == expected
    assert out == ""


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "serve"])
def test_sigterm_is_as_ctrl_c(cli: Cli, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    def stopped(args: object) -> int:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("it went on")

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(COMMANDS[command], "run", stopped)
    assert cli(command, *FEWEST.get(command, ["m"])) == (143, "", "")
    assert signal.getsignal(signal.SIGTERM) is before, "the program's own handler is gone"


FEWEST: dict[str, list[str]] = {
    "list": [],
    "cache": [],
    "completion": ["bash"],
    "bench": ["engine", "--target", "m"],
    "audit": ["m", "--prompts", "p"],
    "cluster": ["up", "c.yaml"],
    "train": ["eagle", "m", "--prompts", "p", "--out", "o"],
    "generate": ["m", "p"],
}


@pytest.mark.parametrize("argv", [["--help"], ["generate", "--help"]], ids=" ".join)
def test_a_reader_that_went_away_is_no_drama(argv: list[str]) -> None:
    command = [sys.executable, "-m", "paceline.cli.main", *argv]
    env = os.environ | {"PYTHONUNBUFFERED": ""}  # unbuffered, argparse itself swallows the error
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.parametrize(("flags", "traceback"), [([], False), (["--verbose"], True)])
def test_the_log_shows_tracebacks_only_when_asked(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, flags: list[str], traceback: bool
) -> None:
    def warn(args: object) -> int:
        logging.getLogger("paceline.engine").warning("it went wrong", exc_info=ValueError("why"))
        return 0

    monkeypatch.setattr(inspect, "run", warn)
    status, _, err = cli("inspect", "m", *flags)
    assert status == 0
    assert err.startswith("paceline: it went wrong\n")
    assert ("ValueError: why" in err) is traceback
