"""/v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.server import sse
from paceline.server.answers.anthropic import MessagesAnswer
from paceline.server.dialects import ANTHROPIC
from paceline.server.protocol.answers import new_id
from paceline.server.protocol.anthropic import AnthropicAnswer, CountedTokens, CountRequest, MessagesRequest
from paceline.server.routes.common import ParsedRoute, bridge_of, streams, translator_of
from paceline.server.translate.anthropic import messages_chat
from paceline.server.translate.encoding import check_bytes

router = APIRouter(route_class=ParsedRoute, tags=["Anthropic"], responses=ANTHROPIC.errors)
EVENTS = "events of type message_start, content_block_*, message_delta and message_stop"


@router.post(
    "/v1/messages",
    response_model=AnthropicAnswer,
    responses=streams(AnthropicAnswer, EVENTS, dialect=ANTHROPIC),
    summary="Answer a conversation, in the form of Anthropic's Messages",
)
async def messages(body: MessagesRequest, http: Request) -> Response:
    bridge = bridge_of(http)
    asked = await translator_of(http).foreign(messages_chat(body), new_id("msg"))
    answer = MessagesAnswer(asked, bridge.llm.tokenizer, model=bridge.model)
    return await sse.send(answer, http, bridge, asked.requests, stream=bool(body.stream))


@router.post(
    "/v1/messages/count_tokens", summary="Tokens of a conversation and its tools", response_model_exclude_none=True
)
async def count_tokens(body: CountRequest, http: Request) -> CountedTokens:
    translator = replace(translator_of(http), bounded=False)
    check_bytes(body, allowed=translator.settings.max_tokenize_bytes, field="messages")
    asked = await translator.foreign(messages_chat(body), new_id("count"))
    return CountedTokens(input_tokens=len(asked.requests[0].prompt), ignored_fields=[*asked.ignored] or None)
