"""Anthropic's messages as a chat: blocks, tools, tool choice and the form of the answer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from paceline.errors import InvalidRequest
from paceline.server.protocol.anthropic import (
    AnthropicMessage,
    AnthropicTool,
    AnthropicToolChoice,
    Block,
    CountRequest,
    MessagesRequest,
)
from paceline.server.protocol.requests import ChatRequest, FormatOptions, Message, ignored
from paceline.server.translate.foreign import Foreign

SAME = ("temperature", "top_p", "top_k", "stream", "seed", "speculation", "prediction")  # fields of a chat, too
NAMES = {  # field of a chat → Anthropic's
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "max_completion_tokens": "max_tokens",
}
PLACES = {  # beginning of a name in a chat → Anthropic's
    r"response_format\.json_schema": "output_config.format",
    r"(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}  # type of a tool_choice → OpenAI's word
FAILED = "Error: "  # begins the result of a tool that failed; chat templates have no field for it
THOUGHTS = ("thinking", "redacted_thinking")  # blocks that are left out: a model gets no earlier thoughts to read


def messages_chat(body: CountRequest) -> Foreign:
    """Read the body of /v1/messages, or of a count, as a chat."""
    messages = [*_instructions(body.system), *conversation(body.messages)]
    fields: dict[str, Any] = {"model": body.model, "messages": messages}
    fields |= {"tools": _tools(body.tools), "response_format": _format(body)}
    fields |= {"tool_choice": _tool_choice(body.tool_choice), "parallel_tool_calls": _parallel(body.tool_choice)}
    if messages and messages[-1].role == "assistant" and not messages[-1].tool_calls:
        fields["continue_final_message"] = True
    if isinstance(body, MessagesRequest):
        fields |= {"max_completion_tokens": body.max_tokens, "stop": body.stop_sequences}
        fields |= {name: getattr(body, name) for name in SAME}
    chat = ChatRequest(**{name: value for name, value in fields.items() if value is not None})
    return Foreign(chat, frozenset(_ignored(body)), NAMES, PLACES)


def conversation(messages: Sequence[AnthropicMessage]) -> list[Message]:
    """Read messages, in which results of tools are messages of their own and neighbours of one role are one."""
    said: list[Message] = []
    names: dict[str, str] = {}  # id of a call → name of its tool
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if message.role not in READERS:
            known = ", ".join(READERS)
            raise InvalidRequest(f"{where}.role is {message.role!r:.60}; it is one of {known}", param="messages")
        given = message.content
        blocks = [Block.model_validate({"type": "text", "text": given})] if isinstance(given, str) else given
        for part in READERS[message.role](blocks, f"{where}.content", names):
            _append(said, part)
    return said


def _append(said: list[Message], message: Message) -> None:
    """Add a message, to the last one if both have one role.

    Results of tools stay by themselves, and so does a text after calls, since a message has its text first."""
    last = said[-1] if said else None
    after_calls = last is not None and last.tool_calls and not message.tool_calls
    if last is None or last.role != message.role or message.role == "tool" or after_calls:
        said.append(message)
        return
    texts = [text for text in (last.content, message.content) if isinstance(text, str) and text]
    merged: dict[str, Any] = {"role": message.role, "content": "\n".join(texts)}
    calls = [*(last.tool_calls or ()), *(message.tool_calls or ())]
    said[-1] = Message.model_validate(merged | {"tool_calls": calls} if calls else merged)


def _user(blocks: Sequence[Block], where: str, names: dict[str, str]) -> Iterator[Message]:
    """Yield the results of tools, then the rest of the message."""
    texts = []
    for i, block in enumerate(blocks):
        if block.type == "tool_result":
            yield _result(block, f"{where}[{i}]", names)
        else:
            texts.append(_text(block, f"{where}[{i}]"))
    if texts:
        yield Message(role="user", content="\n".join(texts))
    elif not blocks:
        raise InvalidRequest(f"{where} is empty; send at least one block", param="messages")


def _assistant(blocks: Sequence[Block], where: str, names: dict[str, str]) -> Iterator[Message]:
    texts, calls = [], []
    for i, block in enumerate(blocks):
        if block.type == "tool_use":
            calls.append(_call(block, f"{where}[{i}]"))
            names[calls[-1]["id"]] = calls[-1]["function"]["name"]
        elif block.type not in THOUGHTS:
            texts.append(_text(block, f"{where}[{i}]"))
    fields: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    yield Message.model_validate(fields | {"tool_calls": calls} if calls else fields)


def _system(blocks: Sequence[Block], where: str, names: dict[str, str]) -> Iterator[Message]:
    texts = [_text(block, f"{where}[{i}]") for i, block in enumerate(blocks)]
    yield Message(role="system", content="\n".join(texts))


PLACES_OF_BLOCKS = {  # type of a block that stands where only text may → its place
    "tool_use": "a call belongs into a message of the assistant",
    "tool_result": "what came of a call belongs into a message of the user",
}
READERS = {"user": _user, "assistant": _assistant, "system": _system}  # role → reader of its blocks


def _call(block: Block, where: str) -> dict[str, Any]:
    if block.id is None or block.name is None:
        raise InvalidRequest(f"{where} is a tool_use: it needs id, name and input", param="messages")
    function = {"name": block.name, "arguments": json.dumps(block.input or {}, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def _result(block: Block, where: str, names: dict[str, str]) -> Message:
    if block.tool_use_id is None:
        raise InvalidRequest(f"{where} is a tool_result: it needs tool_use_id", param="messages")
    content = block.content or ""
    if not isinstance(content, str):
        content = "\n".join(_text(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    fields = {"role": "tool", "content": f"{FAILED}{content}" if block.is_error else content}
    named = {"name": names[block.tool_use_id]} if block.tool_use_id in names else {}
    return Message.model_validate(fields | {"tool_call_id": block.tool_use_id} | named)


def _text(block: Block, where: str) -> str:
    field = "system" if where.startswith("system") else "messages"
    if block.type == "text" and block.text is None:
        raise InvalidRequest(f"{where} is a text: it needs the field text", param=field)
    if block.type != "text" or block.text is None:
        told = PLACES_OF_BLOCKS.get(block.type, "this model reads text only: send blocks of type text")
        raise InvalidRequest(f"{where} is of type {block.type[:60]!r}; {told}", param=field)
    return block.text


def _instructions(system: str | list[Block] | None) -> Iterable[Message]:
    if isinstance(system, str):
        return [Message(role="system", content=system)] if system else []
    return _system(system, "system", {}) if system else []


def _tools(tools: Sequence[AnthropicTool] | None) -> list[dict[str, Any]] | None:
    return None if tools is None else [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _tool(tool: AnthropicTool, where: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise InvalidRequest(
            f"{where} is of type {tool.type[:60]!r}, which only Anthropic's models know; describe it by a name and an "
            "input_schema, or leave it out",
            param="tools",
        )
    function: dict[str, Any] = {"name": tool.name, "description": tool.description}
    function |= {"parameters": tool.input_schema, "strict": tool.strict}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _tool_choice(choice: AnthropicToolChoice | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    if choice.type == "tool" and choice.name is not None:
        return {"type": "function", "function": {"name": choice.name}}
    if choice.type not in CHOICES:
        raise InvalidRequest(
            f"tool_choice is auto, any, none, or of type tool with a name; not {choice.type[:60]!r}",
            param="tool_choice",
        )
    return CHOICES[choice.type]


def _parallel(choice: AnthropicToolChoice | None) -> bool | None:
    return False if choice is not None and choice.disable_parallel_tool_use else None


def _format(body: CountRequest) -> FormatOptions | None:
    given = body.output_config.format if body.output_config is not None else None
    if given is None:
        return None
    if given.get("type") != "json_schema":
        raise InvalidRequest(
            f'output_config.format is {{"type": "json_schema", "schema": {{…}}}}, not of type '
            f"{given.get('type')!r:.60}",
            param="output_config.format",
        )
    return FormatOptions(type="json_schema", json_schema={"schema": given.get("schema")}, pattern=None)


def _ignored(body: CountRequest) -> Iterator[str]:
    """Yield the names of fields and blocks without effect."""
    yield from ignored(body)
    if body.thinking is not None and body.thinking.get("type") != "disabled":
        yield "thinking"
    for i, message in enumerate(body.messages):
        for j, block in enumerate(message.content if isinstance(message.content, list) else ()):
            if block.type in THOUGHTS:
                yield f"messages[{i}].content[{j}]"
