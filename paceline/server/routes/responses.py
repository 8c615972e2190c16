"""/v1/responses: OpenAI's newer form of a chat, with calls of functions. Nothing is kept between two requests."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.server import sse
from paceline.server.answers.responses import ResponsesAnswer
from paceline.server.protocol.answers import ResponseObject, new_id
from paceline.server.protocol.requests import ResponsesRequest
from paceline.server.routes.common import ParsedRoute, bridge_of, streams, translator_of

router = APIRouter(route_class=ParsedRoute, tags=["OpenAI"])


@router.post(
    "/v1/responses",
    response_model=ResponseObject,
    responses=streams(ResponseObject, "events of type response.*"),
    summary="Answer a conversation, in the form of OpenAI's Responses",
)
async def responses(body: ResponsesRequest, http: Request) -> Response:
    bridge = bridge_of(http)
    asked = await translator_of(http).response(body, new_id("resp"))
    answer = ResponsesAnswer(body, asked, bridge.llm.tokenizer, model=bridge.model)
    return await sse.send(answer, http, bridge, asked.requests, stream=bool(body.stream))
