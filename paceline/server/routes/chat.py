"""/v1/chat/completions"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.server import sse
from paceline.server.answers.chat import ChatAnswer
from paceline.server.protocol.answers import ChatCompletion, new_id
from paceline.server.protocol.requests import ChatRequest
from paceline.server.routes.common import ParsedRoute, bridge_of, streams, translator_of

router = APIRouter(route_class=ParsedRoute, tags=["OpenAI"])


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses=streams(ChatCompletion, "chunks of type chat.completion.chunk, then [DONE]"),
    summary="Answer a conversation",
)
async def chat(body: ChatRequest, http: Request) -> Response:
    bridge = bridge_of(http)
    asked = await translator_of(http).chat(body, new_id("chatcmpl"))
    answer = ChatAnswer(body, asked, bridge.llm.tokenizer, model=bridge.model)
    return await sse.send(answer, http, bridge, asked.requests, stream=bool(body.stream))
