"""/v1/completions: one prompt or many, as text or token ids."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.server import sse
from paceline.server.answers.completions import CompletionAnswer
from paceline.server.protocol.answers import Completion, new_id
from paceline.server.protocol.requests import CompletionRequest
from paceline.server.routes.common import ParsedRoute, bridge_of, streams, translator_of

router = APIRouter(route_class=ParsedRoute, tags=["OpenAI"])


@router.post(
    "/v1/completions",
    response_model=Completion,
    responses=streams(Completion, "chunks of type text_completion, then [DONE]"),
    summary="Continue prompts",
)
async def completions(body: CompletionRequest, http: Request) -> Response:
    bridge = bridge_of(http)
    asked = await translator_of(http).completion(body, new_id("cmpl"))
    answer = CompletionAnswer(body, asked, bridge.llm.tokenizer, model=bridge.model)
    return await sse.send(answer, http, bridge, asked.requests, stream=bool(body.stream))
