"""Colours and runs of tokens."""

from __future__ import annotations

import io

import pytest

from paceline.cli.screen import OriginRuns
from paceline.cli.style import GREEN_BOLD, RESET, Style, wants_colour
from paceline.llm import LLM
from paceline.types import Origin, TokenEvent


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def no_wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("terminal", "wishes", "expected"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (False, {"FORCE_COLOR": "1"}, True),
        (True, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
    ],
)
def test_who_gets_colours(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, wishes: dict[str, str], expected: bool
) -> None:
    for name, value in wishes.items():
        monkeypatch.setenv(name, value)
    assert wants_colour(Terminal() if terminal else io.StringIO()) is expected


def test_text_of_a_model_cannot_steer_a_terminal() -> None:
    nasty = "a\x1b]0;title\x07b\n\tc\x9b"
    assert Style(Terminal()).token(nasty, Origin.PLAIN) == "a\\x1b]0;title\\x07b\n\tc\\x9b"
    assert Style(io.StringIO()).token(nasty, Origin.PLAIN) == nasty, "a file gets what the model said"
    assert Style(Terminal()).token("x", Origin.ACCEPTED) == f"{GREEN_BOLD}x{RESET}"


def test_runs_follow_the_tokens_also_where_text_is_held_back(tiny: str) -> None:
    llm = LLM(tiny, format="fp32")
    a, b, c, e1, e2 = llm.encode("abcé")
    accepted, bonus = Origin.ACCEPTED, Origin.BONUS
    runs = OriginRuns(llm.tokenizer)

    def event(tokens: list[int], origins: list[Origin], text: str) -> TokenEvent:
        return TokenEvent(request_id="0", sample=0, tokens=tuple(tokens), origins=tuple(origins), text=text)

    assert list(runs.of(event([a, b], [accepted, bonus], "a"))) == [("a", accepted)]
    assert list(runs.of(event([c, e1], [accepted, accepted], "bc"))) == [("b", bonus), ("c", accepted)]
    assert list(runs.of(event([e2], [bonus], "é"))) == [("é", bonus)]
    assert list(runs.of(event([], [], "\ufffd"))) == [("\ufffd", Origin.PLAIN)]
