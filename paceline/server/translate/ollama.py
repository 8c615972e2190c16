"""Ollama's chats and prompts as OpenAI's: messages, options, forms."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.errors import InvalidRequest
from paceline.server.protocol.ollama import (
    OllamaCall,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
    OllamaRequest,
)
from paceline.server.protocol.requests import (
    ChatRequest,
    CompletionRequest,
    FormatOptions,
    Message,
    SpeculationOptions,
    ignored,
)
from paceline.server.translate.foreign import Foreign

LATEST = ":latest"  # tag of a name without one
OPTIONS = {  # option → field of a chat
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
NAMES = {field: f"options.{option}" for option, field in OPTIONS.items()} | {
    "max_tokens": "options.num_predict",
    "max_completion_tokens": "options.num_predict",
    "max_draft": "options.draft_num_predict",
    "speculation.max_draft": "options.draft_num_predict",
    "response_format": "format",
}
PLACES = {r"response_format\.json_schema\.schema": "format"}  # beginning of a name in a chat → Ollama's
NO_TIME = re.compile(r"0+(\.0*)?[a-z]*")  # a duration of zero


def bare_name(name: str | None) -> str | None:
    """Leave out the tag that says nothing."""
    return name if name is None else name.removesuffix(LATEST)


def tagged_name(name: str) -> str:
    """Write a model's name as Ollama does, with a tag."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def unloads(body: OllamaRequest) -> bool:
    """True if the model would be unloaded after the answer."""
    return body.keep_alive is not None and NO_TIME.fullmatch(str(body.keep_alive)) is not None


def ollama_chat(body: OllamaChatRequest) -> Foreign:
    return _chat(body, body.messages or (), body.tools)


def ollama_prompt(body: OllamaGenerateRequest, *, templated: bool, max_tokens: int) -> Foreign:
    """Read the body of /api/generate: as a chat of one message, or as a text to continue.

    `templated`: the model has a chat template. `max_tokens`: limit of a text to continue that has none of its own."""
    _check_prompt(body)
    if templated and not body.raw and not body.suffix:
        turns = {"system": body.system, "user": body.prompt}
        said = [{"role": role, "content": content} for role, content in turns.items() if content]
        return _chat(body, [OllamaMessage.model_validate(message) for message in said])
    fields = {"prompt": body.prompt or "", "suffix": body.suffix or None, "max_tokens": _limit(body) or max_tokens}
    fields |= {
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        "parse_special": bool(body.raw and not body.suffix) or None,
    }
    made = CompletionRequest(**_given(_common(body) | fields))
    return Foreign(made, frozenset({*_ignored(body), *(["system"] if body.system else [])}), NAMES, PLACES)


def _chat(body: OllamaRequest, messages: Sequence[OllamaMessage], tools: list[dict[str, Any]] | None = None) -> Foreign:
    fields = _common(body) | {"messages": conversation(messages), "tools": tools}
    fields |= {"max_completion_tokens": _limit(body), "logprobs": body.logprobs, "top_logprobs": body.top_logprobs}
    if messages and messages[-1].role == "assistant" and not messages[-1].tool_calls:
        fields["continue_final_message"] = True
    return Foreign(ChatRequest(**_given(fields)), frozenset(_ignored(body)), NAMES, PLACES)


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _check_prompt(body: OllamaGenerateRequest) -> None:
    refused = {
        "template": "the template is the model's own",
        "context": "nothing is kept here: send the conversation to /api/chat",
        "images": "this model reads text only",
    }
    for name, why in refused.items():
        if getattr(body, name):
            raise InvalidRequest(f"{name} is refused: {why}; leave the field out", param=name)
    if body.raw and body.system:
        raise InvalidRequest("a raw prompt is the whole text: write system into it", param="system")


def conversation(messages: Sequence[OllamaMessage]) -> list[Message]:
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: OllamaMessage, where: str) -> Message:
    if message.images:
        raise InvalidRequest(f"{where} has images; this model reads text only: leave them out", param="messages")
    fields: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.tool_calls:
        fields["tool_calls"] = [_call(call, i) for i, call in enumerate(message.tool_calls)]
    if message.role == "tool":
        fields |= {"name": message.tool_name, "tool_call_id": message.tool_call_id}
    return Message.model_validate(_given(fields))


def _call(call: OllamaCall, index: int) -> dict[str, Any]:
    arguments = json.dumps(call.function.arguments or {}, ensure_ascii=False)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id or f"call_{index}", "type": "function", "function": function}


def _common(body: OllamaRequest) -> dict[str, Any]:
    """Read the fields that chats and completions have alike."""
    if body.think:
        raise InvalidRequest(
            f"think is {body.think!r:.60}: thoughts are not told from the answer here; leave it out", param="think"
        )
    options = body.options or OllamaOptions.model_validate({})
    fields = {field: getattr(options, option) for option, field in OPTIONS.items()}
    if options.seed == -1:
        fields["seed"] = None
    fields |= {"model": bare_name(body.model), "response_format": _format(body), "prediction": body.prediction}
    return fields | {"speculation": _speculation(body.speculation, options.draft_num_predict)}


def _speculation(given: SpeculationOptions | None, draft_tokens: int | None) -> SpeculationOptions | None:
    if draft_tokens is None:
        return given
    asked = {"enabled": False} if draft_tokens == 0 else {"max_draft": draft_tokens}
    return SpeculationOptions.model_validate(asked | ({} if given is None else given.model_dump(exclude_unset=True)))


def _limit(body: OllamaRequest) -> int | None:
    asked = body.options.num_predict if body.options is not None else None
    return asked if asked is not None and asked > 0 else None


def _format(body: OllamaRequest) -> FormatOptions | None:
    if body.format in (None, ""):
        return None
    if isinstance(body.format, dict):
        return FormatOptions(type="json_schema", json_schema={"schema": body.format}, pattern=None)
    if body.format != "json":
        raise InvalidRequest(f"format is json or a JSON schema, not {body.format[:60]!r}", param="format")
    return FormatOptions(type="json_object", json_schema=None, pattern=None)


def _ignored(body: OllamaRequest) -> Iterator[str]:
    yield from ignored(body)
    yield from (name for name in ("keep_alive", "think") if getattr(body, name) is not None)
