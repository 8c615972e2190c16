"""Answers that come as choices: what chats and completions have in common. In which words a choice is told is the
matter of a `Form`, which stands with its route.

Chunks are made of plain dicts and not of the models in `protocol`, because there is one for every token; the tests hold
them against those models.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from paceline.server import sse
from paceline.server.answers import Choice, Tally, Wanted
from paceline.server.problems import ErrorDetail
from paceline.server.protocol import ChatCompletion, Completion, Usage
from paceline.types import TokenEvent

Fields = dict[str, Any]


class Form(Protocol):
    chunk: str  # the name of its chunks
    begins: bool  # whether the first chunk of a choice is needed before anything is said

    def whole(self) -> ChatCompletion | Completion: ...

    def begun(self, choice: Choice) -> Fields:
        """The first chunk of a choice, as far as it differs from endpoint to endpoint."""

    def said(self, choice: Choice, event: TokenEvent, texts: list[str]) -> Fields | None:
        """The chunk of an event; None: it is not worth one. `texts`: of each token, where `Wanted.texts`."""


class ChoicesReply:
    def __init__(self, form: Form, tally: Tally, wanted: Wanted) -> None:
        self._form = form
        self._tally = tally
        self._wanted = wanted
        self._head = sse.chunk_head(tally.head() | {"object": form.chunk})
        self._remarks: Fields = {"ignored_fields": [*tally.asked.ignored]} if tally.asked.ignored else {}

    # At once.

    def add(self, event: TokenEvent) -> None:
        self._tally.add(event)

    def whole(self) -> ChatCompletion | Completion:
        made = self._form.whole()
        made.usage = Usage.model_validate(self._tally.usage())
        made.speculation = self._tally.speculation()
        self._tally.remark(made)
        return made

    # As a stream.

    def chunks(self, event: TokenEvent) -> Iterator[bytes]:
        tally, wanted = self._tally, self._wanted
        if not tally.meet(event).begun:
            yield from self._begin(tally.meet(event))
        choice = tally.add(event)
        texts = choice.texts(event.tokens) if wanted.texts else []
        fields = self._form.said(choice, event, texts)
        if fields is None:
            return
        if wanted.events:
            fields["paceline"] = {
                "round": choice.events,
                "drafter": event.drafter,
                "origins": event.origins,
                "token_texts": texts,
            }
        if tally.over:
            fields["speculation"] = tally.speculation().model_dump()
        yield self._chunk(fields)

    def _begin(self, choice: Choice) -> Iterator[bytes]:
        choice.begun = True
        if self._form.begins or self._remarks:
            yield self._chunk(self._form.begun(choice) | self._remarks)
            self._remarks = {}

    def end(self) -> Iterator[bytes]:
        if self._wanted.usage:
            yield sse.chunk(self._head, {"choices": [], "usage": self._tally.usage()})
        yield sse.DONE

    def broken(self, error: ErrorDetail) -> list[bytes]:
        return sse.error_chunks(error)

    def _chunk(self, fields: Fields) -> bytes:
        if self._wanted.usage_always:
            fields["usage"] = self._tally.usage()
        elif self._wanted.usage:
            fields["usage"] = None  # as OpenAI has it: null in all chunks but the last
        return sse.chunk(self._head, fields)
