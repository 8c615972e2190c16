"""/api/embed and /api/embeddings: vectors of texts, in Ollama's form."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from paceline.server import sse
from paceline.server.answers.ollama_embeddings import EmbedAnswer, OldEmbedAnswer
from paceline.server.dialects import OLLAMA
from paceline.server.protocol.answers import new_id
from paceline.server.protocol.ollama import EmbedRequest, OldEmbedRequest, OldOllamaEmbedding, OllamaEmbeddings
from paceline.server.routes.common import bridge_of, translator_of
from paceline.server.translate.embeddings import translate_embeddings
from paceline.server.translate.ollama import bare_name, ollama_texts, tagged_name

router = APIRouter(tags=["Ollama"], responses=OLLAMA.errors)


@router.post("/api/embed", response_model=OllamaEmbeddings, summary="Vectors of texts")
async def embed(body: EmbedRequest, http: Request) -> Response:
    bridge, name = bridge_of(http), body.model or tagged_name(bridge_of(http).model)
    if not body.input:
        translator_of(http).check_model(bare_name(body.model))
        empty = OllamaEmbeddings(model=name, embeddings=[], total_duration=1, load_duration=0, prompt_eval_count=0)
        return JSONResponse(empty.model_dump(exclude_none=True))
    asked = await translate_embeddings(translator_of(http), ollama_texts(body, body.input), new_id("embd"))
    return await sse.send(EmbedAnswer(asked, model=name), http, bridge, asked.requests, stream=False)


@router.post("/api/embeddings", response_model=OldOllamaEmbedding, summary="The vector of a text, in the old form")
async def old_embed(body: OldEmbedRequest, http: Request) -> Response:
    if not body.prompt:
        translator_of(http).check_model(bare_name(body.model))
        return JSONResponse({"embedding": []})
    asked = await translate_embeddings(translator_of(http), ollama_texts(body, body.prompt), new_id("embd"))
    return await sse.send(OldEmbedAnswer(asked), http, bridge_of(http), asked.requests, stream=False)
