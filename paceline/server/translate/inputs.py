"""Prompts of a completion, parts of a text, and the items of /v1/responses as messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.errors import InvalidRequest
from paceline.server.protocol.requests import ContentPart, InputItem, Message, ResponsesRequest

MAX_PROMPTS = 256  # in one request
REASONING = "reasoning"  # type of items that are left out


def split_prompts(prompt: str | Sequence[Any], *, may_be_empty: bool = False) -> list[str | list[int]]:
    """Read a text, token ids, or a list of either, as a list of prompts. Before a suffix, a prompt may be empty."""
    prompts: list[Any] = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else [*prompt]
    if not prompts or not (may_be_empty or all(prompts)):
        raise InvalidRequest("the prompt is empty; give a text, or at least one token id", param="prompt")
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequest(
            f"{len(prompts)} prompts in one request; at most {MAX_PROMPTS} are allowed", param="prompt"
        )
    return prompts


def content_text(content: str | Sequence[ContentPart], field: str) -> str:
    """Join the parts of a text. `field`: its name in the body, for errors."""
    if isinstance(content, str):
        return content
    for part in content:
        if part.type != "text" or part.text is None:
            raise InvalidRequest(f"the parts of {field} must be of type text, not {part.type[:60]!r}", param=field)
    return "".join(part.text or "" for part in content)


def split_beginning(messages: Sequence[Message], field: str) -> tuple[Sequence[Message], str]:
    """Take the beginning of the answer, which is the assistant's last message, from a conversation."""
    *earlier, last = messages
    if not earlier or last.role != "assistant" or last.tool_calls:
        raise InvalidRequest(
            "an answer continues the last message only if that is a text of the assistant after another message",
            param=field,
        )
    return earlier, content_text(last.content or "", field)


def response_messages(body: ResponsesRequest) -> list[Message]:
    """Read the instructions and the input of /v1/responses as the messages of a chat."""
    if not body.input:
        raise InvalidRequest("input is empty; send a text or a list of messages", param="input")
    messages = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
    if isinstance(body.input, str):
        return [*messages, Message(role="user", content=body.input)]
    for i, item in enumerate(body.input):
        if item.type == "function_call":
            _add_call(messages, item, f"input[{i}]")
        elif item.type != REASONING:
            messages.append(_input_message(item, f"input[{i}]"))
    return messages


def unused_items(body: ResponsesRequest) -> list[str]:
    """Name the items of reasoning: this model's own reasoning, if it writes any, is in its messages."""
    items = [] if isinstance(body.input, str) else body.input
    return [f"input[{i}]" for i, item in enumerate(items) if item.type == REASONING]


def _input_message(item: InputItem, where: str) -> Message:
    if item.type == "function_call_output":
        if item.output is None or item.call_id is None:
            raise InvalidRequest(f"{where} is what came of a call: it needs call_id and output", param="input")
        return Message.model_validate({"role": "tool", "content": _content(item.output), "tool_call_id": item.call_id})
    if item.type not in (None, "message") or item.role is None:
        known = "a message with a role and content, a function_call, a function_call_output or reasoning"
        raise InvalidRequest(f"{where} must be {known}; nothing else is supported", param="input")
    return Message(role=item.role, content=_content(item.content))


def _add_call(messages: list[Message], item: InputItem, where: str) -> None:
    """Add a call to the assistant's last message, where a chat has it."""
    if item.name is None or item.call_id is None:
        raise InvalidRequest(f"{where} is a call: it needs name, arguments and call_id", param="input")
    call = {
        "id": item.call_id,
        "type": "function",
        "function": {"name": item.name, "arguments": item.arguments or "{}"},
    }
    said = messages.pop() if messages and messages[-1].role == "assistant" else Message(role="assistant", content=None)
    calls = [*(said.tool_calls or ()), call]
    messages.append(Message.model_validate(said.model_dump(exclude_unset=True) | {"tool_calls": calls}))


def _content(content: Any) -> Any:
    """Rename the parts' types input_text and output_text to text, as chats call them."""
    if not isinstance(content, list):
        return content
    renamed = [part.model_copy() for part in content]
    for part in renamed:
        if part.type in ("input_text", "output_text"):
            part.type = "text"
    return renamed
