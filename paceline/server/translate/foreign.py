"""Bodies of other APIs as OpenAI's, so that one path leads to the engine.

An adapter (`translate.anthropic`, `translate.ollama`) makes a `Foreign`; `Translator.foreign` translates it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from paceline.errors import InvalidRequest
from paceline.server.protocol.requests import ChatRequest, CompletionRequest, RequestPart


@dataclass(frozen=True, slots=True)
class Foreign:
    """A body of another API, in OpenAI's form."""

    body: ChatRequest | CompletionRequest
    ignored: frozenset[str] = frozenset()  # fields of the foreign body that have no effect
    names: Mapping[str, str] = field(default_factory=dict)  # field of `body` → its name in the foreign body

    def renamed(self, error: InvalidRequest) -> InvalidRequest:
        """Say which foreign field is at fault, where it has another name than in `body`."""
        name = self.names.get(error.param or "")
        if name is None:
            return error
        return InvalidRequest(f"{name}: {error}", param=name)


def unknown(part: RequestPart, prefix: str = "") -> Iterator[str]:
    """Yield the names of unknown fields that are not null; the same field of many parts in a list has one name."""
    for name, value in (part.model_extra or {}).items():
        if value is not None:
            yield prefix + name
    for name in part.model_fields_set & type(part).model_fields.keys():
        value = getattr(part, name)
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, RequestPart):
                yield from unknown(inner, f"{prefix}{name}.")
