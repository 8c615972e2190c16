"""From a `types.Grammar` to llguidance's own language: a JSON list of grammars, the first of which may name others.

Schemas pass `schema_limits.checked_schema` on the way. Nothing is compiled here. Raises ValueError, which says why a
grammar cannot be used.
"""

from __future__ import annotations

import json
import re
from typing import Any

from paceline.errors import InvalidRequest
from paceline.sampling.schema_limits import MAX_TEXT, checked_schema
from paceline.types import Grammar

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,24}"  # between the parts of JSON; without a limit a small model goes on for ever

# The first grammar of calls, in Lark's syntax. TEXT ends where OPEN first stands in it (lazy), if calls are marked.
# Bare calls are the whole answer, so that other text must not begin as JSON does.
MARKED_IN_TEXT = """start: {start}
TEXT: /(?s:.*)/
begin[lazy]: TEXT {open}
tail: TEXT
marked: begin /[ \\n]{{0,4}}/ @call /[ \\n]{{0,4}}/ {close}
"""
BARE_OR_TEXT = """start: {calls} | TEXT
TEXT: /[ \\t\\r\\n]*([^ \\t\\r\\n{{\\[](?s:.*))?/
"""
MARKED_OR_FORM = """start: {calls} | @form
marked: {open} /[ \\n]{{0,4}}/ @call /[ \\n]{{0,4}}/ {close}
"""
BARE_OR_FORM = "start: {calls} | @form\n"


def source(grammar: Grammar) -> str:
    """Translate a grammar to llguidance's language."""
    try:
        grammars = _calls(json.loads(grammar.text)) if grammar.kind == "calls" else [_single(grammar)]
    except (KeyError, TypeError):
        raise ValueError("the text of a calls grammar is made by Grammar.calls") from None
    return json.dumps({"grammars": grammars})


def _single(grammar: Grammar) -> dict[str, Any]:
    if grammar.kind == "regex":
        return _regex(grammar.text)
    if grammar.kind == "choice":
        return _regex("|".join(map(re.escape, _choices(grammar.text))))
    schema = checked_schema(grammar.text) if grammar.kind == "json_schema" else {"type": "object"}
    return {"json_schema": {"x-guidance": {"whitespace_pattern": WHITESPACE}} | schema}  # or the schema's own options


def _regex(pattern: str) -> dict[str, Any]:
    from llguidance import LLMatcher

    lark: str = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"][0]["lark_grammar"]
    return {"lark_grammar": lark}


def _calls(parts: dict[str, Any]) -> list[dict[str, Any]]:
    marks, parallel, otherwise = parts["marks"], parts["parallel"], parts["otherwise"]
    names = {"open": json.dumps(marks[0]), "close": json.dumps(marks[1])} if marks else {}
    call, gap = ("marked", r"/[ \n]{0,4}/") if marks else ("@call", r"/;?[ \n]{0,4}/")
    names["calls"] = f"{call} ({gap} {call})*" if parallel else call
    names["start"] = "marked* tail" if parallel else "marked | TEXT"
    if otherwise is None:
        lark = MARKED_IN_TEXT if marks else BARE_OR_TEXT
    else:
        lark = MARKED_OR_FORM if marks else BARE_OR_FORM
    others = [("call", Grammar("json_schema", parts["call"]))]
    others += [] if otherwise is None else [("form", Grammar(*otherwise))]
    return [{"lark_grammar": lark.format(**names)}, *({"name": name} | _single(grammar) for name, grammar in others)]


def _choices(text: str) -> list[str]:
    choices = json.loads(text)
    if not isinstance(choices, list) or not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError("choices are a JSON list of non-empty texts")
    if any(len(choice) > MAX_TEXT for choice in choices):
        raise ValueError(f"a choice is too big: at most {MAX_TEXT} characters are allowed")
    return choices


def unusable(grammar: Grammar, reason: str) -> InvalidRequest:
    """Make the error of a grammar that cannot be compiled or followed."""
    return InvalidRequest(f"this {grammar.kind} grammar cannot be used: {reason}", param="grammar")


def first_lines(error: object) -> str:
    """Write an error of llguidance, which takes several lines, on one line of at most 400 characters."""
    return " ".join(str(error).removesuffix("<non-verbose/>").split())[:400]
