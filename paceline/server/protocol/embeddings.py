"""Bodies of /v1/embeddings, and of Ollama's /api/embed and the older /api/embeddings."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from paceline.server.protocol.requests import Prompt, RequestPart, Texts


class EmbeddingsRequest(RequestPart):
    input: Prompt = Field(
        description="a text, token ids, or a list of either", json_schema_extra={"minLength": 1, "minItems": 1}
    )
    model: str | None = Field(None, description="the model that is served; see /v1/models")
    encoding_format: str | None = Field(None, description="float (the default) or base64: little-endian float32")
    dimensions: int | None = Field(None, description="none but the model's own hidden size")
    user: str | None = None


class Embedding(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str = Field(description="a vector of length 1, or its base64")


class EmbeddingsUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class Embeddings(BaseModel):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage
    ignored_fields: list[str] | None = None


class OllamaEmbedRequest(RequestPart):
    input: str | Texts = Field(description="a text or a list of texts; empty: nothing is done")
    model: str | None = Field(None, description="the model that is served, with :latest or without; see /api/tags")
    truncate: bool | None = Field(None, description="false: a text beyond the context is refused, and not cut")
    dimensions: int | None = Field(None, description="none but the model's own hidden size")
    keep_alive: str | float | None = Field(None, description="no effect: the model stays loaded")


class OllamaOldEmbedRequest(RequestPart):
    prompt: str
    model: str | None = None
    keep_alive: str | float | None = Field(None, description="no effect: the model stays loaded")


class OllamaEmbeddings(BaseModel):
    model: str
    embeddings: list[list[float]]
    total_duration: int = Field(description="nanoseconds")
    load_duration: int = 0
    prompt_eval_count: int
    ignored_fields: list[str] | None = None


class OllamaOldEmbedding(BaseModel):
    embedding: list[float]
