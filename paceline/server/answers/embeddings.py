"""The answer to /v1/embeddings: one vector for each text, in their order."""

from __future__ import annotations

import base64
from collections.abc import Iterable

import numpy as np

from paceline.server.dialects import ErrorDetail
from paceline.server.protocol.embeddings import Embedding, Embeddings, EmbeddingsUsage
from paceline.server.translate.translator import Translation
from paceline.types import TokenEvent


class EmbeddingsAnswer:
    """Collects the vectors. It is never a stream."""

    def __init__(self, asked: Translation, *, model: str, as_base64: bool) -> None:
        self._asked = asked
        self._model = model
        self._as_base64 = as_base64
        self._vectors: dict[str, tuple[float, ...]] = {}

    @property
    def vectors(self) -> list[tuple[float, ...]]:
        return [self._vectors[request.id] for request in self._asked.requests]

    def add(self, event: TokenEvent) -> None:
        if event.embedding is not None:
            self._vectors[event.request_id] = event.embedding

    def whole(self) -> Embeddings:
        tokens = sum(len(request.prompt) for request in self._asked.requests)
        data = [
            Embedding(object="embedding", index=i, embedding=self._written(vector))
            for i, vector in enumerate(self.vectors)
        ]
        usage = EmbeddingsUsage(prompt_tokens=tokens, total_tokens=tokens)
        made = Embeddings(object="list", data=data, model=self._model, usage=usage)
        if self._asked.ignored:
            made.ignored_fields = [*self._asked.ignored]
        return made

    def _written(self, vector: tuple[float, ...]) -> list[float] | str:
        return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode() if self._as_base64 else [*vector]

    def chunks(self, event: TokenEvent) -> Iterable[bytes]:
        raise AssertionError("embeddings are not streamed")

    def end(self) -> Iterable[bytes]:
        raise AssertionError("embeddings are not streamed")

    def fail(self, error: ErrorDetail) -> Iterable[bytes]:
        raise AssertionError("embeddings are not streamed")
