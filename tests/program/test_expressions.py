"""What `gen`, `select` and messages refuse, where they are made."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.errors import InvalidRequest
from paceline.program import assistant, gen, select, system, user
from paceline.program.expressions import Expression, Gen

WRONG: dict[str, tuple[Callable[[], Expression], str]] = {
    "no name": (lambda: gen(""), "a variable's name must be a non-empty text"),
    "a name that is none": (lambda: select(3, ["a"]), "a variable's name must be a non-empty text, not 3"),
    "a misspelt option": (lambda: gen("a", temprature=1), "unknown option of gen 'temprature'; did you mean"),
    "a bad value": (lambda: gen("a", temperature=-1), "temperature must be in"),
    "no limit": (lambda: gen("a", max_tokens=None), "max_tokens of gen is a number of tokens"),
    "several answers": (lambda: gen("a", n=2), "gen takes no n: fork the state instead"),
    "scores of the prompt": (lambda: gen("a", prompt_logprobs=1), "gen takes no prompt_logprobs: use select"),
    "schema and grammar": (
        lambda: gen("a", schema={}, grammar=3),
        "gen has schema and grammar; an answer has one form",
    ),
    "grammar of no kind": (lambda: gen("a", grammar="x"), "grammar must be a Grammar"),
    "grammar against tokens": (lambda: gen("a", regex="a", ignore_eos=True), "leave out ignore_eos"),
    "empty choices": (lambda: gen("a", choices=[]), "choice must be a list of non-empty texts"),
    "schema that is no JSON": (lambda: gen("a", schema={"a": {1}}), "the schema is not JSON"),
    "prediction": (lambda: gen("a", prediction="\ud800"), "prediction must be valid Unicode"),
    "no options": (lambda: select("a", []), "options must be a list of non-empty texts"),
    "one text as options": (lambda: select("a", "yes"), "options must be a list"),
    "an empty option": (lambda: select("a", ["", "b"]), "options must be a list of non-empty texts"),
    "an option twice": (lambda: select("a", ["b", "c", "b"]), "options has 'b' twice"),
    "an option that is no text": (lambda: select("a", ["\udc00"]), "must be valid Unicode"),
    "a norm": (lambda: select("a", ["b"], by="totl"), "unknown norm of select 'totl'; did you mean 'total'"),
    "gen of a user": (lambda: user("a", gen("b")), "'b' is generated inside user()"),
    "a message in a message": (lambda: assistant(user("a")), "a message inside assistant()"),
    "a number": (lambda: "a" + gen("b") + 3, "a state takes texts, gen, select and messages, not int"),
    "bytes": (lambda: system(b"a"), "not bytes"),
    "half a pair": (lambda: gen("a") + "\ud800", "a text of a program must be valid Unicode"),
}


@pytest.mark.parametrize("what", WRONG)
def test_refused(what: str) -> None:
    make, message = WRONG[what]
    with pytest.raises(InvalidRequest) as caught:
        make()
    assert message in str(caught.value)


def test_expressions_join() -> None:
    made = "a" + gen("b") + "" + "c" + gen("d")
    assert [part if isinstance(part, str) else part.name for part in made.parts] == ["a", "b", "c", "d"]
    assert isinstance(made.parts[1], Gen)
    assert made.parts[1].sampling == {"max_tokens": 128}
