"""The `paceline` program: its commands, and the exit status of each outcome.

    0    done
    1    the run failed: the engine died, a rank was lost, training stopped, speculation changed a text of the demo or
         of an audit, requests of `bench serve` failed, `bench compare` found a regression, nothing kept to the `--slo`
         of `tune`, or a figure of `plan --against` differs
    2    the request cannot be served: a bad option, model, prompt or parameter
    130  interrupted with Ctrl-C; a measurement, an audit or a training keeps what it has
    143  the same, by SIGTERM; `serve` drains instead and exits with 0
    141  the reader of the output closed the pipe

An error is one line on stderr, never a traceback (`--verbose` shows the log). Neither this module nor that of a command
imports torch before the command runs: help is instant.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Protocol

from paceline import __version__
from paceline.cli import (
    audit,
    bench,
    cache,
    chat,
    cluster,
    completion,
    demo,
    drafters,
    generate,
    inspect,
    plan,
    pull,
    replay,
    rm,
    run,
    serve,
    train,
    tune,
)
from paceline.cli import list as list_command
from paceline.cli.interrupts import interrupted_status, stopped_by_signals
from paceline.cli.parser import Parser
from paceline.errors import EngineDead, InvalidRequest, PacelineError, RankLost, TrainingError, UnknownOption

DESCRIPTION = """Exact speculative decoding for LLMs: the same text, sooner.

paceline run                                    # talk with the embedded SmolLM2; others may use its server
paceline serve ./model.gguf --port 9000         # a server for OpenAI's clients, with a playground
paceline generate smollm2 "Once upon a time"    # continue a text
"""


class Command(Protocol):
    """The module of a command; the first line of its docstring is `Name: summary`."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


COMMANDS: Mapping[str, Command] = {
    "run": run,
    "chat": chat,
    "serve": serve,
    "cluster": cluster,
    "generate": generate,
    "pull": pull,
    "list": list_command,
    "rm": rm,
    "inspect": inspect,
    "drafters": drafters,
    "bench": bench,
    "audit": audit,
    "replay": replay,
    "plan": plan,
    "tune": tune,
    "train": train,
    "demo": demo,
    "cache": cache,
    "completion": completion,
}


def main(argv: Sequence[str] | None = None) -> int:
    try:
        try:
            with stopped_by_signals():
                return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()  # here, where BrokenPipeError is caught
    except PacelineError as error:
        print(f"paceline: error: {_one_line(error)}", file=sys.stderr)
        return 1 if isinstance(error, EngineDead | RankLost | TrainingError) else 2
    except KeyboardInterrupt:
        return interrupted_status()
    except BrokenPipeError:
        _forget_stdout()
        return 141


def _run(argv: list[str]) -> int:
    parser, parsers = build_parsers()
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        raise UnknownOption("command", argv[0], COMMANDS)
    args, unknown = parser.parse_known_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    if getattr(args, "prompts", None) == []:  # argparse before Python 3.13 gives words behind an option to nobody
        args.prompts = [word for word in unknown if not word.startswith("-")]
        unknown = [word for word in unknown if word.startswith("-")]
    if unknown:
        raise _unknown(unknown[0], getattr(args, "parser", parsers[args.command]))  # or the subcommand's parser
    _accept_any_text()
    _start_log(verbose=args.verbose)
    return COMMANDS[args.command].run(args)


def build_parsers() -> tuple[Parser, dict[str, Parser]]:
    parser = Parser(prog="paceline", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    parsers = {}
    for name, command in COMMANDS.items():
        summary = (command.__doc__ or "").split("\n")[0].partition(": ")[2]
        parsers[name] = commands.add_parser(name, help=summary, description=command.__doc__)
        command.add_arguments(parsers[name])
        parsers[name].add_argument("--verbose", action="store_true", help="show the log, with tracebacks")
    return parser, parsers


def _unknown(word: str, parser: Parser) -> InvalidRequest:
    if not word.startswith("-"):
        return InvalidRequest(f"unexpected argument {word!r}; see `{parser.prog} --help`")
    option = word.partition("=")[0]
    known = sorted(set(re.findall(r"--[a-z][a-z-]*", parser.format_help())))
    near = get_close_matches(option, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"see `{parser.prog} --help`"
    return InvalidRequest(f"unknown option {option!r}; {hint}")


class _Terse(logging.Formatter):
    """A formatter without tracebacks: the last line of an error says enough to a user."""

    def formatException(self, ei: object) -> str:  # noqa: N802 - logging's name
        return ""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).rstrip("\n")


def _start_log(*, verbose: bool) -> None:
    """Send the log to stderr: warnings as one line each, with `verbose` everything."""
    handler = logging.StreamHandler()
    formatter = logging.Formatter if verbose else _Terse
    handler.setFormatter(formatter("paceline: %(message)s"))
    logger = logging.getLogger("paceline")
    logger.handlers = [handler]
    logger.setLevel(logging.DEBUG if verbose else logging.WARNING)


def _accept_any_text() -> None:
    """Show characters that the terminal's encoding lacks as question marks, instead of failing."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _forget_stdout() -> None:
    """Redirect stdout to nowhere, so that flushing what is still buffered does not fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
