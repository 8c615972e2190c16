"""Mixes: batches in which some requests carry a sampling parameter, measured beside batches in which none does.

`json:16` is a mix: the first 16 requests of a batch answer in a JSON schema. A schema needs a model with a tokenizer;
its text is never complete before the last token that is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import InvalidRequest, UnknownOption
from paceline.types import Grammar, Request, SamplingParams, Speculation

RECORD: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "city": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
    },
    "required": ["name", "city", "age", "tags"],
    "additionalProperties": False,
}


def _json(params: SamplingParams) -> SamplingParams:
    records = {"type": "array", "items": RECORD, "minItems": params.max_tokens}  # each takes several tokens
    return replace(params, ignore_eos=False, grammar=Grammar.json_schema(records))


KINDS: Mapping[str, Callable[[SamplingParams], SamplingParams]] = {
    "logprobs": lambda params: replace(params, logprobs=5),
    "penalty": lambda params: replace(params, repetition_penalty=1.1, frequency_penalty=0.1),
    "bias": lambda params: replace(params, logit_bias=dict.fromkeys(range(16), -1.0)),
    "filters": lambda params: replace(params, temperature=0.8, top_p=0.95, top_k=50),
    "json": _json,
}


@dataclass(frozen=True, slots=True)
class Mix:
    kind: str
    count: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.count}"

    def apply(self, requests: Sequence[Request]) -> list[Request]:
        """Change the first requests of a batch. What a grammar forces is drafted without a drafter, as for a server."""
        first, rest = requests[: self.count], requests[self.count :]
        changed = [replace(request, sampling=KINDS[self.kind](request.sampling)) for request in first]
        if self.kind == "json":
            changed = [replace(request, speculation=Speculation()) for request in changed]
        return [*changed, *rest]


def mixes(text: str) -> tuple[Mix, ...]:
    """Read mixes as they are given on the command line: `logprobs:1,json:16`."""
    return tuple(_mix(part) for part in text.split(","))


def _mix(text: str) -> Mix:
    kind, _, count = text.partition(":")
    if kind not in KINDS:
        raise UnknownOption("mix", kind, KINDS)
    if not count.isdecimal() or not int(count):
        raise InvalidRequest(f"a mix is KIND:COUNT with a count of at least 1, such as {kind}:1, not {text!r}")
    return Mix(kind, int(count))
