"""The parser of every command: usage in one line, then examples, then the options in groups.

A description is paragraphs of text. A paragraph whose lines are all commands has examples, and is shown first.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

from paceline.errors import InvalidRequest

COMMAND = ("paceline", "echo ", "torchrun ")  # how an example begins
LAST_GROUP = "engine"  # of options that hardly anybody needs


class Parser(argparse.ArgumentParser):
    """A parser that raises instead of leaving the process, and accepts no abbreviations."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)
        self._positionals.title = "arguments"

    def error(self, message: str) -> NoReturn:
        raise InvalidRequest(f"{message}; see `{self.prog} --help`")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Write a message. A reader that has gone is an error, which argparse would hide from texts beyond 8 KiB."""
        (file or sys.stderr).write(message)

    def format_help(self) -> str:
        self.usage = " ".join([self.prog, *self._needed(), "[options]"]).replace("%", "%%")
        self._action_groups.sort(key=lambda group: group.title == LAST_GROUP)
        summary, examples, rest = sections(self.description or "")
        shown = ["examples:", *(f"  {line}" for line in examples)] if examples else []
        described, self.description = self.description, "\n\n".join(filter(None, (summary, "\n".join(shown), *rest)))
        try:
            return super().format_help()
        finally:
            self.description = described

    def _needed(self) -> list[str]:
        """The arguments that stand in the usage: those with a place, and options that must be given."""
        places = [_place(action) for action in self._actions if not action.option_strings]
        required = [action for action in self._actions if action.option_strings and action.required]
        return [*places, *(f"{action.option_strings[0]} {action.metavar}" for action in required)]


def sections(description: str) -> tuple[str, list[str], list[str]]:
    """Split a description into its first paragraph, the lines that are examples, and the other paragraphs."""
    paragraphs = [text.strip("\n") for text in description.strip().split("\n\n")]
    first, others = paragraphs[0], paragraphs[1:]
    are_examples = [all(line.startswith(COMMAND) for line in text.split("\n")) for text in others]
    examples = [line for text, yes in zip(others, are_examples, strict=True) if yes for line in text.split("\n")]
    return first, examples, [text for text, yes in zip(others, are_examples, strict=True) if not yes]


def _place(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest)
    return {"?": f"[{name}]", "*": f"[{name} …]", "+": f"{name} …"}.get(str(action.nargs), name)
