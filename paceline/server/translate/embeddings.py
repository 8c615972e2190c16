"""Texts to be embedded, as requests of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paceline.errors import InvalidRequest
from paceline.server.protocol.embeddings import EmbeddingsRequest, OllamaEmbedRequest
from paceline.server.protocol.requests import ignored
from paceline.server.translate.inputs import split_prompts
from paceline.server.translate.ollama import bare_name
from paceline.server.translate.translator import Translation, Translator
from paceline.text.fim import MAX_TOKEN_CHARACTERS
from paceline.types import EMBEDDING, OFF, Request

ENCODINGS = ("float", "base64")


async def translate_embeddings(translator: Translator, body: EmbeddingsRequest, id: str) -> Translation:
    translator.check_model(body.model)
    if body.encoding_format is not None and body.encoding_format not in ENCODINGS:
        raise InvalidRequest(
            f"encoding_format must be float or base64, not {body.encoding_format[:60]!r}", param="encoding_format"
        )
    check_dimensions(translator, body.dimensions)
    return await embed(translator, body.input, id, ignored=sorted(ignored(body)))


async def translate_ollama_embeddings(translator: Translator, body: OllamaEmbedRequest, id: str) -> Translation:
    translator.check_model(bare_name(body.model))
    check_dimensions(translator, body.dimensions)
    if not body.input:  # a client that only wants the model to be loaded
        return Translation(id=id, requests=())
    return await embed(translator, body.input, id, ignored=_ignored(body), cuts=body.truncate is not False)


def _ignored(body: OllamaEmbedRequest) -> list[str]:
    return sorted({*ignored(body), *(["keep_alive"] if body.keep_alive is not None else [])})


def check_dimensions(translator: Translator, asked: int | None) -> None:
    width = translator.llm.parts.target.model.config.hidden_size
    if asked is not None and asked != width:
        raise InvalidRequest(
            f"dimensions must be {width}: embeddings are hidden states of the model, which cannot be shortened",
            param="dimensions",
        )


async def embed(
    translator: Translator, input: str | Sequence[Any], id: str, *, ignored: Sequence[str] = (), cuts: bool = False
) -> Translation:
    """Make one request for each text or list of token ids. The last event of each has the embedding.

    `cuts`: a text beyond the context loses its end."""
    try:
        texts = split_prompts(input)
        translator.check_capacity(len(texts), 1)
    except InvalidRequest as error:
        raise InvalidRequest(str(error).replace("prompt", "input"), param="input") from None
    most = translator.max_context - 1 if cuts else None
    requests = [
        Request(
            id=f"{id}-{i}",
            prompt=tuple(await _encoded(translator, text, most)),
            sampling=EMBEDDING,
            speculation=OFF,
            tenant=translator.tenant,
            deadline=translator.settings.request_timeout,
            pooling=translator.settings.embedding_pooling,
        )
        for i, text in enumerate(texts)
    ]
    return Translation(id=id, requests=tuple(requests), ignored=tuple(ignored))


async def _encoded(translator: Translator, text: str | list[int], most: int | None) -> Sequence[int]:
    if isinstance(text, list):
        return text
    if most is None:
        return await translator.encode_text(text, field="input")
    whole = replace(translator, bounded=False)  # what does not fit is cut, not refused
    return (await whole.encode_text(text[: most * MAX_TOKEN_CHARACTERS], field="input"))[:most]
