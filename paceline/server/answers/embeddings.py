"""The answer to /v1/embeddings: one vector for each text, in their order; and the part that all such answers share."""

from __future__ import annotations

import base64
from collections.abc import Iterable

import numpy as np

from paceline.server.dialects import ErrorDetail
from paceline.server.protocol.embeddings import Embedding, Embeddings, EmbeddingsUsage
from paceline.server.translate.translator import Translation
from paceline.types import TokenEvent


class VectorAnswer:
    """Collects the vectors of texts. Such an answer is never a stream."""

    def __init__(self, asked: Translation) -> None:
        self._asked = asked
        self._vectors: dict[str, tuple[float, ...]] = {}

    @property
    def vectors(self) -> list[tuple[float, ...]]:
        return [self._vectors[request.id] for request in self._asked.requests]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self._asked.requests)

    @property
    def remarks(self) -> dict[str, list[str]]:
        """The fields of an answer that names what had no effect."""
        return {"ignored_fields": [*self._asked.ignored]} if self._asked.ignored else {}

    def add(self, event: TokenEvent) -> None:
        if event.embedding is not None:
            self._vectors[event.request_id] = event.embedding

    def chunks(self, event: TokenEvent) -> Iterable[bytes]:
        raise AssertionError("embeddings are not streamed")

    def end(self) -> Iterable[bytes]:
        raise AssertionError("embeddings are not streamed")

    def fail(self, error: ErrorDetail) -> Iterable[bytes]:
        raise AssertionError("embeddings are not streamed")


class EmbeddingsAnswer(VectorAnswer):
    def __init__(self, asked: Translation, *, model: str, as_base64: bool) -> None:
        super().__init__(asked)
        self._model = model
        self._as_base64 = as_base64

    def whole(self) -> Embeddings:
        data = [
            Embedding(object="embedding", index=i, embedding=self._written(vector))
            for i, vector in enumerate(self.vectors)
        ]
        usage = EmbeddingsUsage(prompt_tokens=self.prompt_tokens, total_tokens=self.prompt_tokens)
        return Embeddings(object="list", data=data, model=self._model, usage=usage, **self.remarks)

    def _written(self, vector: tuple[float, ...]) -> list[float] | str:
        return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode() if self._as_base64 else [*vector]
