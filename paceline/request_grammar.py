"""The grammar of an answer, as a request sets it: a kind and a text.

It checks itself for what can be told without a vocabulary. `paceline.sampling.grammar` compiles it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from paceline.checks import checked_tuple, surrogate_at
from paceline.errors import InvalidRequest, UnknownOption

# Kind of a grammar → most characters of its text.
GRAMMARS = {"json_object": 0, "json_schema": 1 << 18, "regex": 1 << 13, "choice": 1 << 16, "calls": 1 << 19}


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form of an answer: any JSON object, JSON that follows a schema, a text that a regular expression matches as
    a whole, one of several texts, or calls of tools beside text or a form. See `paceline.sampling.grammar`."""

    kind: str
    text: str = ""  # the schema, the expression, a JSON list of the choices, or a JSON object about the calls

    @classmethod
    def json_object(cls) -> Self:
        return cls("json_object")

    @classmethod
    def json_schema(cls, schema: str | bool | Mapping[str, Any]) -> Self:
        try:
            return cls("json_schema", schema if isinstance(schema, str) else json.dumps(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"the schema is not JSON: {error}", param="grammar") from None

    @classmethod
    def regex(cls, pattern: str) -> Self:
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Iterable[str]) -> Self:
        choices = checked_tuple("choice", texts, param="grammar")
        if not choices or not all(isinstance(text, str) and text for text in choices):
            raise InvalidRequest(f"choice must be a list of non-empty texts, not {texts!r:.100}", param="grammar")
        return cls("choice", json.dumps(choices, ensure_ascii=False))

    @classmethod
    def calls(
        cls, call: Self, *, marks: tuple[str, str] | None, parallel: bool = True, otherwise: Self | None = None
    ) -> Self:
        """Calls that follow the grammar `call`, each between two `marks` or bare. With `otherwise`, the answer is calls
        or follows that grammar. Without, it is any text: marked calls may stand in it, bare ones are all of it."""
        parts = {"call": call.text, "marks": marks, "parallel": parallel}
        return cls("calls", json.dumps(parts | {"otherwise": otherwise and [otherwise.kind, otherwise.text]}))

    def __post_init__(self) -> None:
        if self.kind not in GRAMMARS:
            raise UnknownOption("grammar", str(self.kind), GRAMMARS, param="grammar")
        problem = self._problem()
        if problem is not None:
            raise InvalidRequest(problem, param="grammar")

    def _problem(self) -> str | None:
        if not isinstance(self.text, str):
            return f"a {self.kind} grammar is given as a text, not as {type(self.text).__name__}"
        if bool(self.text) != (self.kind != "json_object"):
            return f"a {self.kind} grammar {'takes no text' if self.text else 'needs a text'}"
        if len(self.text) > GRAMMARS[self.kind]:
            return f"a {self.kind} grammar has at most {GRAMMARS[self.kind]} characters, not {len(self.text)}"
        if surrogate_at(self.text) is not None:
            return "a grammar must be valid Unicode; this one holds half a surrogate pair"
        return None
