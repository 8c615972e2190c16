"""/infill: text between two others, in the form of llama.cpp, for editors."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.server import sse
from paceline.server.answers.infill import InfillAnswer
from paceline.server.protocol.answers import new_id
from paceline.server.protocol.llama_cpp import Infilled, InfillRequest
from paceline.server.routes.common import ParsedRoute, bridge_of, streams, translator_of

router = APIRouter(route_class=ParsedRoute, tags=["llama.cpp"])


@router.post(
    "/infill",
    response_model=Infilled,
    responses=streams(Infilled, "events of the same form"),
    summary="Write the text between two others",
)
async def infill(body: InfillRequest, http: Request) -> Response:
    bridge = bridge_of(http)
    asked = await translator_of(http).infill(body, new_id("infill"))
    answer = InfillAnswer(body, asked, bridge.llm.tokenizer, model=bridge.model)
    return await sse.send(answer, http, bridge, asked.requests, stream=bool(body.stream))
