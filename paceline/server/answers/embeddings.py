"""Answers with one vector for each text, in their order: in OpenAI's form, and in Ollama's."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterable

import numpy as np
from pydantic import BaseModel

from paceline.server.dialects import ErrorDetail
from paceline.server.protocol.embeddings import (
    Embedding,
    Embeddings,
    EmbeddingsUsage,
    OllamaEmbeddings,
    OllamaOldEmbedding,
)
from paceline.server.translate.translator import Translation
from paceline.types import TokenEvent


class Vectors:
    """Collects the vectors. It is never a stream."""

    def __init__(self, asked: Translation, *, model: str) -> None:
        self.asked = asked
        self.model = model
        self.tokens = sum(len(request.prompt) for request in asked.requests)
        self._by_request: dict[str, tuple[float, ...]] = {}

    @property
    def vectors(self) -> list[tuple[float, ...]]:
        return [self._by_request[request.id] for request in self.asked.requests]

    def add(self, event: TokenEvent) -> None:
        if event.embedding is not None:
            self._by_request[event.request_id] = event.embedding

    def whole(self) -> BaseModel:
        raise NotImplementedError

    def chunks(self, event: TokenEvent) -> Iterable[bytes]:
        raise AssertionError("embeddings are not streamed")

    def end(self) -> Iterable[bytes]:
        raise AssertionError("embeddings are not streamed")

    def fail(self, error: ErrorDetail) -> Iterable[bytes]:
        raise AssertionError("embeddings are not streamed")


class EmbeddingsAnswer(Vectors):
    def __init__(self, asked: Translation, *, model: str, as_base64: bool) -> None:
        super().__init__(asked, model=model)
        self._as_base64 = as_base64

    def whole(self) -> Embeddings:
        data = [
            Embedding(object="embedding", index=i, embedding=self._written(vector))
            for i, vector in enumerate(self.vectors)
        ]
        usage = EmbeddingsUsage(prompt_tokens=self.tokens, total_tokens=self.tokens)
        made = Embeddings(object="list", data=data, model=self.model, usage=usage)
        if self.asked.ignored:
            made.ignored_fields = [*self.asked.ignored]
        return made

    def _written(self, vector: tuple[float, ...]) -> list[float] | str:
        return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode() if self._as_base64 else [*vector]


class OllamaEmbeddingsAnswer(Vectors):
    def __init__(self, asked: Translation, *, model: str) -> None:
        super().__init__(asked, model=model)
        self._began = time.perf_counter_ns()

    def whole(self) -> OllamaEmbeddings:
        made = OllamaEmbeddings(
            model=self.model,
            embeddings=[[*vector] for vector in self.vectors],
            total_duration=time.perf_counter_ns() - self._began,
            load_duration=0,
            prompt_eval_count=self.tokens,
        )
        if self.asked.ignored:
            made.ignored_fields = [*self.asked.ignored]
        return made


class OllamaOldEmbeddingAnswer(Vectors):
    def whole(self) -> OllamaOldEmbedding:
        return OllamaOldEmbedding(embedding=[*self.vectors[0]] if self.vectors else [])
