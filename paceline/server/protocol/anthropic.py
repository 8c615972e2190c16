"""Bodies of Anthropic's API: /v1/messages and /v1/messages/count_tokens. `translate.anthropic` reads them.

A block has the fields of all types of blocks, so that an error names the type that is not served here.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from paceline.chat.tools import MAX_TOOLS
from paceline.checks import MAX_STOPS
from paceline.server.protocol.answers import SpeculationStats
from paceline.server.protocol.requests import (
    PredictionOptions,
    RequestPart,
    SpeculationOptions,
    Texts,
    within,
)


class Block(RequestPart):
    """A part of a message."""

    type: str = Field(description="text, tool_use, tool_result, or thinking, which is left out")
    text: str | None = None
    id: str | None = Field(None, description="of a tool_use")
    name: str | None = Field(None, description="of a tool_use")
    input: dict[str, Any] | None = Field(None, description="of a tool_use")
    tool_use_id: str | None = Field(None, description="of a tool_result")
    content: str | list[Block] | None = Field(None, description="of a tool_result")
    is_error: bool | None = Field(None, description="of a tool_result: the tool failed")


class AnthropicMessage(RequestPart):
    role: str = Field(description="user, assistant or system; an assistant's last message is continued")
    content: str | list[Block]


class AnthropicTool(RequestPart):
    type: str | None = Field(None, description="custom: the client runs it; no other is served")
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class AnthropicToolChoice(RequestPart):
    type: str = Field(description="auto, any, tool or none")
    name: str | None = Field(None, description="of type tool")
    disable_parallel_tool_use: bool | None = None


class OutputConfig(RequestPart):
    format: dict[str, Any] | None = Field(None, description='{"type": "json_schema", "schema": {…}}')


class CountRequest(RequestPart):
    """Fields of a conversation."""

    model: str | None = Field(None, description="the model that is served; see /v1/models")
    messages: list[AnthropicMessage] = Field(json_schema_extra={"minItems": 1})
    system: str | list[Block] | None = None
    tools: list[AnthropicTool] | None = within(maxItems=MAX_TOOLS)
    tool_choice: AnthropicToolChoice | None = None
    thinking: dict[str, Any] | None = Field(None, description="no effect: the model thinks as its template has it")
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest):
    max_tokens: int = Field(json_schema_extra={"minimum": 1})
    temperature: float | None = within("0: always the most likely token", minimum=0, maximum=100)
    top_p: float | None = within(exclusiveMinimum=0, maximum=1)
    top_k: int | None = within("0 or -1: off", minimum=-1, maximum=2**31)
    stop_sequences: Texts | None = within(maxItems=MAX_STOPS)
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    seed: int | None = Field(None, description="Paceline's own: same seed, same text")
    speculation: SpeculationOptions | None = None
    prediction: PredictionOptions | None = Field(None, description="what the answer may turn out to be: a draft of it")


class TextBlock(BaseModel):
    type: Literal["text"] = "text"
    text: str


class ToolUseBlock(BaseModel):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


class AnthropicUsage(BaseModel):
    input_tokens: int = Field(description="of the prompt, without those found in the prefix cache")
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    output_tokens: int


class AnthropicAnswer(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"] | None
    stop_sequence: str | None
    usage: AnthropicUsage
    speculation: SpeculationStats | None = None
    ignored_fields: list[str] | None = Field(None, description="fields of the request that had no effect")


class CountedTokens(BaseModel):
    input_tokens: int
    ignored_fields: list[str] | None = None
