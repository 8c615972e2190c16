"""Parts of a program's text: what `s += …` takes. Each is checked where it is made, so that an error has its line.

    "text" + gen("answer", max_tokens=8) + select("verdict", ["yes", "no"])
    user("What is 2 + 2?")        assistant("It is " + gen("sum"))

An expression is a description. Nothing runs before a state takes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.checks import check_known, check_text, checked_tuple
from paceline.errors import InvalidRequest, UnknownOption
from paceline.types import Grammar, SamplingParams, Speculation

MAX_TOKENS = 128  # tokens of a generation that gives no max_tokens
ELSEWHERE = {  # sampling parameters that a generation does not take → what to do instead
    "n": "fork the state instead",
    "prompt_logprobs": "use select, which scores texts",
}
Role = Literal["system", "user", "assistant"]
Norm = Literal["total", "mean"]
NORMS: tuple[Norm, ...] = ("total", "mean")


@dataclass(frozen=True, slots=True)
class Gen:
    """A text that the target writes. `sampling` has what the program gives; the rest is the model's advice."""

    name: str
    sampling: Mapping[str, Any]
    speculation: Speculation
    prediction: str | None = None


@dataclass(frozen=True, slots=True)
class Select:
    """The likeliest of several texts, by total log-probability or by the mean over tokens."""

    name: str
    options: tuple[str, ...]
    by: Norm = "total"


@dataclass(frozen=True, slots=True)
class Begin:
    """The beginning of a message."""

    role: Role


@dataclass(frozen=True, slots=True)
class End:
    """The end of a message. The assistant's goes on until the next one begins."""


Part = str | Gen | Select | Begin | End


@dataclass(frozen=True, slots=True)
class Expression:
    """Parts in order. `+` joins expressions and texts."""

    parts: tuple[Part, ...] = field(default=())

    def __add__(self, other: Any) -> Expression:
        return Expression((*self.parts, *parts_of(other)))

    def __radd__(self, other: Any) -> Expression:
        return Expression((*parts_of(other), *self.parts))


def parts_of(given: Any) -> tuple[Part, ...]:
    """Return the parts of a text or an expression; raise for anything else."""
    if isinstance(given, Expression):
        return given.parts
    if not isinstance(given, str):
        raise InvalidRequest(
            f"a state takes texts, gen, select and messages, not {type(given).__name__}: convert it with str()"
        )
    check_text(given, "a text of a program")
    return (given,) if given else ()


def gen(
    name: str,
    *,
    max_tokens: int = MAX_TOKENS,
    regex: str | None = None,
    schema: str | bool | Mapping[str, Any] | None = None,
    choices: Iterable[str] | None = None,
    speculation: Speculation | None = None,
    prediction: str | None = None,
    **sampling: Any,
) -> Expression:
    """Let the target write a text, which becomes the variable `name`.

    At most one of `regex`, `schema` (a JSON schema), `choices` and `grammar` says which form it has. `sampling` are
    fields of SamplingParams; those that are not given follow the advice of the model's authors. `prediction` is a text
    that the answer may repeat: drafts come from it."""
    _check_name(name)
    if max_tokens is None:
        raise InvalidRequest("max_tokens of gen is a number of tokens, not None", param="max_tokens")
    given = sampling | {"max_tokens": max_tokens}
    for parameter, advice in ELSEWHERE.items():
        if parameter in given:
            raise InvalidRequest(f"gen takes no {parameter}: {advice}", param=parameter)
    grammar = _grammar(sampling.get("grammar"), regex=regex, schema=schema, choices=choices)
    if grammar is not None:
        given["grammar"] = grammar
    check_known(SamplingParams, given, kind="option of gen")
    SamplingParams(**given)
    if prediction is not None:
        check_text(prediction, "prediction", param="prediction")
    return Expression((Gen(name, given, speculation or Speculation(), prediction),))


def select(name: str, options: Iterable[str], *, by: Norm = "total") -> Expression:
    """Continue with the option that the target finds likeliest, which becomes the variable `name`.

    An option's score is the sum of the log-probabilities of its tokens after the text so far, or with `by="mean"` their
    mean, which does not prefer short options."""
    _check_name(name)
    texts = checked_tuple("options", options)
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise InvalidRequest(f"options must be a list of non-empty texts, not {options!r:.100}", param="options")
    for i, text in enumerate(texts):
        check_text(text, f"options[{i}]", param="options")
        if text in texts[:i]:
            raise InvalidRequest(f"options has {text!r:.60} twice: leave one out", param="options")
    if by not in NORMS:
        raise UnknownOption("norm of select", str(by), NORMS, param="by")
    return Expression((Select(name, texts, by),))


def system(*parts: str | Expression) -> Expression:
    """Make a message of the system."""
    return _message("system", parts)


def user(*parts: str | Expression) -> Expression:
    """Make a message of the user."""
    return _message("user", parts)


def assistant(*parts: str | Expression) -> Expression:
    """Begin a message of the assistant. It goes on with whatever the state gets before the next message."""
    return _message("assistant", parts)


def _message(role: Role, given: tuple[str | Expression, ...]) -> Expression:
    inside = tuple(part for each in given for part in parts_of(each))
    for part in inside:
        if isinstance(part, Begin | End):
            raise InvalidRequest(f"a message inside {role}(): end one message before the next begins")
        if role != "assistant" and not isinstance(part, str):
            raise InvalidRequest(f"{part.name!r} is generated inside {role}(): the target writes as assistant() alone")
    end = () if role == "assistant" else (End(),)
    return Expression((Begin(role), *inside, *end))


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"a variable's name must be a non-empty text, not {name!r:.60}", param="name")


def _grammar(
    grammar: Grammar | None,
    *,
    regex: str | None,
    schema: str | bool | Mapping[str, Any] | None,
    choices: Iterable[str] | None,
) -> Grammar | None:
    """Make the grammar of an answer; None: any text. Two forms at once contradict each other."""
    forms = {"regex": regex, "schema": schema, "choices": choices, "grammar": grammar}
    given = [name for name, form in forms.items() if form is not None]
    if len(given) > 1:
        raise InvalidRequest(f"gen has {' and '.join(given)}; an answer has one form: leave the others out")
    if regex is not None:
        return Grammar.regex(regex)
    if schema is not None:
        return Grammar.json_schema(schema)
    return grammar if choices is None else Grammar.choice(choices)
