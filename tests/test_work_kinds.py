"""Which kind of work a request is, and the threshold that goes with it."""

from __future__ import annotations

import pytest

from paceline.errors import InvalidRequest
from paceline.types import Request, Rule, Speculation
from paceline.work_kinds import TEXT_END, WorkKind, detect_kind

EDIT = "Fix this:\n\nimport os\n\ndef f(x):\n    return x\n"
FUNCTION = 'def odd(n):\n    """Tell whether n is odd: two of three numbers that one names are not."""\n'
SYSTEM = "You are a coding assistant.\nSort this list in Python."
LETTER = "Dear Sir;\nI write to you in anger.\nYours.\n"
CODE = ("Why?\n```\nx = 1\n```", EDIT, "int main() {\n  puts(s);\n}\n", FUNCTION, SYSTEM)
STORIES = ("Tell me a story about a dress code.", "", LETTER, "Wo ist die Post?")


@pytest.mark.parametrize("text", CODE)
def test_code(text: str) -> None:
    assert detect_kind(text, structured=False) is WorkKind.CODE
    assert detect_kind(text, structured=True) is WorkKind.JSON


def test_json() -> None:
    for text in ("List three rivers. Output in JSON format.", 'Answer with JSON alone, {"name": …}: one function.'):
        assert detect_kind(text, structured=False) is WorkKind.JSON
    assert detect_kind("Write a JSON parser in C++ code", structured=False) is WorkKind.CODE


@pytest.mark.parametrize("text", STORIES)
def test_narrative(text: str) -> None:
    assert detect_kind(text, structured=False) is WorkKind.NARRATIVE


def test_both_ends_of_a_long_text_count() -> None:
    filler = "It rained and rained on the old town.\n" * TEXT_END
    assert detect_kind(f"```\n{filler}", structured=False) is WorkKind.CODE
    assert detect_kind(f"{filler}```\n", structured=False) is WorkKind.CODE
    assert detect_kind(f"{filler}```\n{filler}", structured=False) is WorkKind.NARRATIVE


def test_a_kind_is_a_threshold() -> None:
    asked = [
        Speculation.of(rule=rule, threshold=kind) for rule in ("threshold", "confidence") for kind in ("code", "json")
    ]
    assert [each.min_likelihood for each in asked] == [0.75, 0.65, 0.75, 0.65]
    assert [each.kind for each in asked] == ["code", "json", "code", "json"]
    assert Speculation.of(rule="typical", threshold="narrative").min_likelihood == 0.5
    given = Speculation(rule=Rule.THRESHOLD, threshold=0.4)
    assert (given.min_likelihood, given.kind, Speculation(rule=Rule.TYPICAL).min_likelihood) == (0.4, None, 0.09)


def test_an_engine_sees_no_auto() -> None:
    with pytest.raises(InvalidRequest, match="auto must be resolved"):
        Request(id="r", prompt=(1,), speculation=Speculation.of(rule="threshold", threshold="auto"))
    with pytest.raises(InvalidRequest, match="or one of code, json, narrative, auto, not 'prose'"):
        Speculation.of(rule="threshold", threshold="prose")
