"""/v1/embeddings: vectors of texts, from the hidden states of the model that is served."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.server import sse
from paceline.server.answers.embeddings import EmbeddingsAnswer
from paceline.server.dialects import ERRORS
from paceline.server.protocol.answers import new_id
from paceline.server.protocol.embeddings import Embeddings, EmbeddingsRequest
from paceline.server.routes.common import ParsedRoute, bridge_of, translator_of
from paceline.server.translate.embeddings import translate_embeddings

router = APIRouter(route_class=ParsedRoute, tags=["OpenAI"], responses=ERRORS)


@router.post("/v1/embeddings", response_model=Embeddings, summary="Vectors of texts")
async def embeddings(body: EmbeddingsRequest, http: Request) -> Response:
    bridge = bridge_of(http)
    asked = await translate_embeddings(translator_of(http), body, new_id("embd"))
    answer = EmbeddingsAnswer(asked, model=bridge.model, as_base64=body.encoding_format == "base64")
    return await sse.send(answer, http, bridge, asked.requests, stream=False)
