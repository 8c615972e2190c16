"""Options of a drafter: the text after the colon of its name, such as `min_ngram=2,max_ngram=4`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline.errors import InvalidRequest, UnknownOption

GONE = {  # option that was, and what to do instead
    "copy": "a lookup is loaded beside it, and the portfolio of both drafts; for its drafts alone, ask for it by name",
}


def parse_options(drafter: str, options: str, known: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
    """Read `name=value` pairs between commas; `known` has the type of each option. Errors name the `drafter`."""
    values: dict[str, Any] = {}
    for option in filter(None, options.split(",")):
        name, _, value = option.partition("=")
        if name in GONE and name not in known:
            raise InvalidRequest(f"the {drafter} drafter has no option {name} any more, leave it out: {GONE[name]}")
        if name not in known:
            raise UnknownOption(f"option of the {drafter} drafter", name, known)
        if name in values:
            raise InvalidRequest(f"{drafter}:{name} is given twice: keep the right one")
        try:
            values[name] = known[name](value)
        except ValueError:
            wanted = "a whole number" if known[name] is int else "a number"
            raise InvalidRequest(f"{drafter}:{name} must be {wanted}, not {value!r}") from None
    return values
