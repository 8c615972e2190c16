"""Texts to be embedded, as requests of the engine."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import InvalidRequest
from paceline.server.protocol.embeddings import EmbeddingsRequest
from paceline.server.protocol.requests import ignored
from paceline.server.translate.inputs import split_prompts
from paceline.server.translate.translator import Translation, Translator
from paceline.types import EMBEDDING, OFF, Request

ENCODINGS = ("float", "base64")


async def translate_embeddings(translator: Translator, body: EmbeddingsRequest, id: str) -> Translation:
    translator.check_model(body.model)
    width = translator.llm.parts.target.model.config.hidden_size
    if body.encoding_format is not None and body.encoding_format not in ENCODINGS:
        raise InvalidRequest(
            f"encoding_format must be float or base64, not {body.encoding_format[:60]!r}", param="encoding_format"
        )
    if body.dimensions is not None and body.dimensions != width:
        raise InvalidRequest(
            f"dimensions must be {width}: embeddings are hidden states of the model, which cannot be shortened",
            param="dimensions",
        )
    try:
        texts = split_prompts(body.input)
    except InvalidRequest as error:
        raise InvalidRequest(str(error).replace("prompt", "input"), param="input") from None
    return await embed(translator, texts, id, ignored=sorted(ignored(body)))


async def embed(
    translator: Translator, texts: Sequence[str | list[int]], id: str, *, ignored: Sequence[str] = ()
) -> Translation:
    """Make one request for each text. The last event of each has the embedding."""
    requests = [
        Request(
            id=f"{id}-{i}",
            prompt=tuple(await translator.encode_text(text, field="input") if isinstance(text, str) else text),
            sampling=EMBEDDING,
            speculation=OFF,
            deadline=translator.settings.request_timeout,
            pooling=translator.settings.embedding_pooling,
        )
        for i, text in enumerate(texts)
    ]
    return Translation(id=id, requests=tuple(requests), ignored=tuple(ignored))
