"""Help begins with the usage in one line and examples that can be typed, of every command and subcommand."""

from __future__ import annotations

import re
import shlex
from argparse import _SubParsersAction
from collections.abc import Iterator

import pytest

from paceline.cli.main import build_parsers
from paceline.cli.parser import Parser, sections
from tests.cli.conftest import Cli


def parsers(parser: Parser) -> Iterator[Parser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, _SubParsersAction):
            for inner in action.choices.values():
                yield from parsers(inner)


ALL = [pytest.param(parser, id=parser.prog) for parser in parsers(build_parsers()[0])]


@pytest.mark.parametrize("parser", ALL)
def test_usage_is_one_line_and_examples_follow(parser: Parser) -> None:
    usage, empty, summary, *rest = parser.format_help().split("\n")
    assert usage.startswith(f"usage: {parser.prog}")
    assert usage.endswith("[options]")
    assert len(usage) <= 100
    assert empty == ""
    assert summary
    assert "examples:" in rest[:5]
    assert parser.format_help() == parser.format_help(), "help leaves the parser as it was"


@pytest.mark.parametrize("parser", ALL)
def test_examples_parse(parser: Parser) -> None:
    _, examples, _ = sections(parser.description or "")
    assert examples
    for line in examples:
        command = re.sub(r"^.*?\bpaceline(\.cli\.main)?( |$)", "", line).partition(" > ")[0]
        build_parsers()[0].parse_args(shlex.split(command, comments=True))
        assert parser.prog.split()[1:] == command.split()[: len(parser.prog.split()) - 1]


def test_what_must_be_given_stands_in_the_usage(cli: Cli) -> None:
    found = {parser.prog: parser.format_help().split("\n")[0] for parser in parsers(build_parsers()[0])}
    assert found["paceline chat"] == "usage: paceline chat [MODEL] [options]"
    assert found["paceline generate"] == "usage: paceline generate MODEL [PROMPT …] [options]"
    assert found["paceline audit"] == "usage: paceline audit [MODEL] --prompts FILE|SET [options]"
    assert found["paceline bench compare"] == "usage: paceline bench compare A.json B.json [options]"
