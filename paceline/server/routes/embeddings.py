"""/v1/embeddings, and Ollama's /api/embed: vectors of texts, from the hidden states of the model that is served."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.server import sse
from paceline.server.answers.embeddings import (
    EmbeddingsAnswer,
    OllamaEmbeddingsAnswer,
    OllamaOldEmbeddingAnswer,
    Vectors,
)
from paceline.server.dialects import ERRORS, OLLAMA
from paceline.server.protocol.answers import new_id
from paceline.server.protocol.embeddings import (
    Embeddings,
    EmbeddingsRequest,
    OllamaEmbeddings,
    OllamaEmbedRequest,
    OllamaOldEmbedding,
    OllamaOldEmbedRequest,
)
from paceline.server.routes.common import ParsedRoute, bridge_of, translator_of
from paceline.server.translate.embeddings import translate_embeddings, translate_ollama_embeddings
from paceline.server.translate.ollama import tagged_name

router = APIRouter(route_class=ParsedRoute)


@router.post("/v1/embeddings", response_model=Embeddings, responses=ERRORS, tags=["OpenAI"], summary="Vectors of texts")
async def embeddings(body: EmbeddingsRequest, http: Request) -> Response:
    asked = await translate_embeddings(translator_of(http), body, new_id("embd"))
    as_base64 = body.encoding_format == "base64"
    return await _send(EmbeddingsAnswer(asked, model=bridge_of(http).model, as_base64=as_base64), http)


@router.post(
    "/api/embed",
    response_model=OllamaEmbeddings,
    responses=OLLAMA.errors,
    tags=["Ollama"],
    summary="Vectors of texts, in Ollama's form",
)
async def ollama_embed(body: OllamaEmbedRequest, http: Request) -> Response:
    asked = await translate_ollama_embeddings(translator_of(http), body, new_id("embd"))
    return await _send(OllamaEmbeddingsAnswer(asked, model=body.model or tagged_name(bridge_of(http).model)), http)


@router.post(
    "/api/embeddings",
    response_model=OllamaOldEmbedding,
    responses=OLLAMA.errors,
    tags=["Ollama"],
    summary="The vector of one text, in Ollama's older form",
)
async def ollama_old_embedding(body: OllamaOldEmbedRequest, http: Request) -> Response:
    newer = OllamaEmbedRequest.model_validate({"input": body.prompt, "model": body.model})
    asked = await translate_ollama_embeddings(translator_of(http), newer, new_id("embd"))
    return await _send(OllamaOldEmbeddingAnswer(asked, model=bridge_of(http).model), http)


async def _send(answer: Vectors, http: Request) -> Response:
    return await sse.send(answer, http, bridge_of(http), answer.asked.requests, stream=False)
