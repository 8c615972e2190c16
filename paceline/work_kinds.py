"""Kinds of work, each with the threshold of lossy rules that suits it, and how a request's kind is detected.

As a threshold a kind is a preset and nothing else: a rule judges by the number behind it. The engine tells past drafts
apart by the kind of their requests (`engine.population`), on which no text depends. `auto` stands for the kind that
`detect_kind` finds where a request is made; no request reaches an engine with it.
"""

from __future__ import annotations

import re
from enum import StrEnum

from paceline.checks import check_number
from paceline.errors import InvalidRequest

TEXT_END = 8_000  # characters at the beginning and at the end of a text that are looked at
# Chosen on the shipped sets: docs/experiments.md, "Thresholds by kind of work (2026-11-18)".
MIN_CODE_LINES = 3  # lines that look like code, and
MIN_CODE_SHARE = 0.2  # their share of all lines, from which on a text is code
MIN_CODE_WORDS = 2  # different words of programmers that make a text one about code

# One such line is enough: the beginning of a definition, or a line of Python's prompt.
_DEFINITION = re.compile(r"^\s*(def \w+\(|class \w+[(:]|>>> |#include\b|fn \w+|func \w+)", re.MULTILINE)
_CODE_LINE = re.compile(
    r"\s*(def |class |import |from \S+ import |return\b|#include|function |const |let |var |public |private |fn |@\w)"
    r"|.*[;{}]\s*$|\s*(if|for|while|else|try|except|with)\b.*:\s*$"
)
_CODE_WORD = re.compile(
    r"\b(codes?|coding|program|programming|programmer|functions?|python|javascript|typescript|java|rust|golang|sql|bash|"
    r"html|css|algorithm|compiler|debug|refactor|implement|arrays?|linked list|binary tree|integers|strings?|script|"
    r"bugs?|unit tests?|stack trace|regex|api|class|method|repository)\b|\bc\+\+|\bo\(n",
    re.IGNORECASE,
)


_ASKS_FOR_JSON = re.compile(
    r"\b(answer|respond|reply|output|return|write|give)\b( \w+){0,4} json\b(?! (parser|file|library))", re.IGNORECASE
)


class WorkKind(StrEnum):
    """What an answer is expected to be."""

    CODE = "code"
    JSON = "json"
    NARRATIVE = "narrative"
    AUTO = "auto"  # not known yet: see `detect_kind`

    @property
    def threshold(self) -> float:
        """How likely a drafted token must be. A wrong token breaks a program, and only colours a story."""
        return THRESHOLDS[self]


# Given, not tuned: what they change is in docs/experiments.md, "Thresholds by kind of work (2026-11-18)".
THRESHOLDS = {WorkKind.CODE: 0.75, WorkKind.JSON: 0.65, WorkKind.NARRATIVE: 0.5}


def read_threshold(given: object) -> float | WorkKind:
    """Read a threshold: a number in (0, 1], or the name of a kind. Raises InvalidRequest for anything else."""
    if isinstance(given, str) and given in [*WorkKind]:
        return WorkKind(given)
    if isinstance(given, str):
        raise InvalidRequest(
            f"threshold must be in (0, 1], or one of {', '.join(WorkKind)}, not {given[:60]!r}", param="threshold"
        )
    check_number("threshold", given, 0, 1, open_low=True)
    assert isinstance(given, int | float), "checked"
    return given


def detect_kind(text: str, *, structured: bool) -> WorkKind:
    """Detect the kind of work from the text of a request. `structured`: it has a grammar, a format or tools."""
    if structured:
        return WorkKind.JSON
    seen = text if len(text) <= 2 * TEXT_END else f"{text[:TEXT_END]}\n{text[-TEXT_END:]}"
    if _ASKS_FOR_JSON.search(seen):
        return WorkKind.JSON
    is_code = "```" in seen or _DEFINITION.search(seen) or _has_code(seen) or _asks_for_code(seen)
    return WorkKind.CODE if is_code else WorkKind.NARRATIVE


def _has_code(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip()]
    code = sum(_CODE_LINE.match(line) is not None for line in lines)
    return code >= max(MIN_CODE_LINES, MIN_CODE_SHARE * len(lines))


def _asks_for_code(text: str) -> bool:
    return len({word.group().lower() for word in _CODE_WORD.finditer(text)}) >= MIN_CODE_WORDS
