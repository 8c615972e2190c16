"""The OpenAPI document tells the truth: of the limits of fields, and of what answers and chunks look like."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import BaseModel

from paceline.server.protocol.answers import ChatChunk, Completion
from paceline.server.protocol.anthropic import MessagesRequest
from paceline.server.protocol.ollama import OllamaChatRequest
from paceline.server.protocol.requests import ChatRequest, CompletionRequest, ResponsesRequest
from tests.server.api import HELLO, Api

BODIES: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, {"messages": HELLO, "max_tokens": 1, "logprobs": True}),
    "/v1/completions": (CompletionRequest, {"prompt": "abc", "max_tokens": 1}),
    "/v1/responses": (ResponsesRequest, {"input": "abc", "max_output_tokens": 1}),
    "/v1/messages": (MessagesRequest, {"messages": HELLO, "max_tokens": 1}),
    "/api/chat": (OllamaChatRequest, {"messages": HELLO, "logprobs": True}),
}
NESTED = {"speculation": "SpeculationOptions", "options": "OllamaOptions"}  # field → definition of its fields
BESIDE: dict[str, dict[str, Any]] = {"speculation": {"rule": "typical"}, "options": {"num_predict": 1}}
FRACTIONS = {
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "speculation.threshold",
    "speculation.p_min",
}
FRACTIONS |= {f"options.{name}" for name in (*FRACTIONS, "repeat_penalty")}


def limits() -> list[tuple[str, str, dict[str, float]]]:
    """(path, field, its limits) for every number that has some; fields of nested objects with a dot."""
    found = []
    for path, (model, _) in BODIES.items():
        schema = model.model_json_schema()
        fields = dict(schema["properties"])
        for outer, definition in NESTED.items():
            own = schema["$defs"].get(definition, {"properties": {}})["properties"]
            fields |= {f"{outer}.{name}": field for name, field in own.items()}
        for name, field in fields.items():
            known = {word: field[word] for word in ("minimum", "maximum", "exclusiveMinimum") if word in field}
            if known:
                found.append((path, name, known))
    return found


def post(api: Api, path: str, field: str, value: float) -> tuple[int, str]:
    body = BODIES[path][1]
    outer, _, inner = field.partition(".")
    response = api.post(path, body | {outer: BESIDE[outer] | {inner: value} if inner else value})
    error = "" if response.status_code == 200 else response.json()["error"]
    return response.status_code, error if isinstance(error, str) else error["message"]


@pytest.mark.unwatched
@pytest.mark.parametrize(("path", "field", "known"), limits(), ids=lambda value: str(value))
def test_limits_are_those_of_the_server(api: Api, path: str, field: str, known: dict[str, float]) -> None:
    """A value just outside is refused because of its range; one at the edge is not."""
    for word, edge in known.items():
        status, message = post(api, path, field, outside(field, word, edge))
        assert status == 400
        assert "must be" in message or "no less than" in message, message
        if word != "exclusiveMinimum":
            status, message = post(api, path, field, edge)
            assert status == 200 or "must be" not in message, message


def outside(field: str, word: str, edge: float) -> float:
    if word == "exclusiveMinimum":
        return edge
    if field in FRACTIONS:
        return math.nextafter(edge, math.inf if word == "maximum" else -math.inf)
    return edge + 1 if word == "maximum" else edge - 1


def test_there_are_limits() -> None:
    assert {"temperature", "seed", "n", "speculation.max_draft"} <= {field for _, field, _ in limits()}


# ── chunks ──


EVERYTHING = {
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "return_token_ids": True,
    "prompt_logprobs": 1,
    "paceline": {"events": True},
    "n": 2,
    "never_heard_of": 1,
    "max_tokens": 40,
}


@pytest.mark.parametrize("fields", [{}, EVERYTHING], ids=["plain", "everything"])
def test_chunks_are_as_documented(api: Api, fields: dict[str, Any]) -> None:
    """Chunks are not made of the models: a field that a model lacks, or of another type, would not survive this."""
    scores = {"logprobs": True, "top_logprobs": 2} if fields else {}
    chats = api.chat_stream(**fields, **scores)
    texts = api.complete_stream(**fields, **({"logprobs": 2, "echo": True} if fields else {}))
    for model, chunks in ((ChatChunk, chats), (Completion, texts)):
        for chunk in chunks:
            assert model.model_validate(chunk).model_dump(exclude_unset=True, mode="json") == chunk
        assert sum("ignored_fields" in chunk for chunk in chunks) == bool(fields)  # once, whichever choice is first
        assert chunks[-1 if not fields else -2]["speculation"]["drafter"] == "ngram"
