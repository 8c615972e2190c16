"""The vectors of texts in Ollama's form, new and old."""

from __future__ import annotations

from paceline.server.answers.embeddings import VectorAnswer
from paceline.server.answers.ollama import nanoseconds
from paceline.server.protocol.ollama import OldOllamaEmbedding, OllamaEmbeddings
from paceline.server.translate.translator import Translation
from paceline.types import TokenEvent


class EmbedAnswer(VectorAnswer):
    def __init__(self, asked: Translation, *, model: str) -> None:
        super().__init__(asked)
        self._model = model
        self._seconds = 0.0  # of the text that took longest

    def add(self, event: TokenEvent) -> None:
        super().add(event)
        if event.stats is not None:
            self._seconds = max(self._seconds, event.stats.time_total)

    def whole(self) -> OllamaEmbeddings:
        return OllamaEmbeddings(
            model=self._model,
            embeddings=[[*vector] for vector in self.vectors],
            total_duration=nanoseconds(self._seconds),
            load_duration=0,
            prompt_eval_count=self.prompt_tokens,
            **self.remarks,
        )


class OldEmbedAnswer(VectorAnswer):
    def whole(self) -> OldOllamaEmbedding:
        [vector] = self.vectors
        return OldOllamaEmbedding(embedding=[*vector], **self.remarks)
