"""/api/chat and /api/generate: Ollama's API."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from paceline.server import sse
from paceline.server.answers.ollama import ChatLines, GenerateLines
from paceline.server.answers.timestamps import timestamp
from paceline.server.dialects import OLLAMA
from paceline.server.protocol.answers import new_id
from paceline.server.protocol.ollama import (
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaGenerateAnswer,
    OllamaGenerateRequest,
    OllamaRequest,
)
from paceline.server.routes.common import ParsedRoute, bridge_of, streams, translator_of
from paceline.server.translate.ollama import bare_name, ollama_chat, ollama_prompt, tagged_name, unloads

router = APIRouter(route_class=ParsedRoute, tags=["Ollama"])
WHAT = "which is the default, a line of JSON whenever the answer grows"


@router.post(
    "/api/chat",
    response_model=OllamaChatAnswer,
    responses=streams(OllamaChatAnswer, WHAT, content_type=sse.LINES, dialect=OLLAMA),
    summary="Answer a conversation, in Ollama's form",
)
async def chat(body: OllamaChatRequest, http: Request) -> Response:
    if not body.messages:
        return _loaded(body, http, {"message": {"role": "assistant", "content": ""}})
    bridge, asked = bridge_of(http), await translator_of(http).foreign(ollama_chat(body), new_id("ollama"))
    answer = ChatLines(asked, bridge.llm.tokenizer, model=_name(body, http))
    return await sse.send(answer, http, bridge, asked.requests, stream=body.streamed, content_type=sse.LINES)


@router.post(
    "/api/generate",
    response_model=OllamaGenerateAnswer,
    responses=streams(OllamaGenerateAnswer, WHAT, content_type=sse.LINES, dialect=OLLAMA),
    summary="Answer a prompt, in Ollama's form",
)
async def generate(body: OllamaGenerateRequest, http: Request) -> Response:
    if not body.prompt and not body.suffix:
        return _loaded(body, http, {"response": ""})
    bridge, translator = bridge_of(http), translator_of(http)
    templated = bridge.llm.tokenizer.chat_template is not None
    given = ollama_prompt(body, templated=templated, max_tokens=translator.max_context)
    asked = await translator.foreign(given, new_id("ollama"))
    answer = GenerateLines(asked, bridge.llm.tokenizer, model=_name(body, http))
    return await sse.send(answer, http, bridge, asked.requests, stream=body.streamed, content_type=sse.LINES)


def _loaded(body: OllamaRequest, http: Request, said: dict[str, object]) -> Response:
    """Answer a request without a prompt, which asks to load or unload the model: it is loaded while it is served."""
    translator_of(http).check_model(bare_name(body.model))
    reason = "unload" if unloads(body) else "load"
    head = {"model": _name(body, http), "created_at": timestamp()}
    return JSONResponse({**head, **said, "done": True, "done_reason": reason})


def _name(body: OllamaRequest, http: Request) -> str:
    """Return the model's name as the client wrote it."""
    return body.model or tagged_name(bridge_of(http).model)
