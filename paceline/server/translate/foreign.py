"""Bodies of other APIs as OpenAI's, so that one path leads to the engine.

An adapter (`translate.anthropic`, `translate.ollama`) makes a `Foreign`; `Translator.foreign` translates it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from paceline.errors import InvalidRequest
from paceline.server.protocol.requests import ChatRequest, CompletionRequest


@dataclass(frozen=True, slots=True)
class Foreign:
    """A body of another API, in OpenAI's form."""

    body: ChatRequest | CompletionRequest
    ignored: frozenset[str] = frozenset()  # fields of the foreign body that have no effect
    names: Mapping[str, str] = field(default_factory=dict)  # field of `body` → its name in the foreign body
    places: Mapping[str, str] = field(default_factory=dict)  # pattern of a beginning of a name → the foreign beginning

    def renamed(self, error: InvalidRequest) -> InvalidRequest:
        """Say which foreign field is at fault, where it has another name than in `body`."""
        name = self.names.get(error.param or "")
        if name is None:
            return error
        return InvalidRequest(f"{name}: {error}".replace(f"{name}: {error.param} ", f"{name} "), param=name)

    def in_its_words(self, names: Iterable[str]) -> Iterator[str]:
        """Translate names of fields of `body` that have no effect. Messages were made here: theirs are left out."""
        for name in names:
            if not name.startswith("messages["):
                for pattern, place in self.places.items():
                    name = re.sub(f"^{pattern}", place, name)
                yield name
