"""Bodies of Ollama's API, /api/…

`translate.ollama` reads them; `answers.ollama` and `routes.ollama_models` write them. Durations are nanoseconds, times
are texts as in RFC 3339.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from paceline.chat.tools import MAX_TOOLS
from paceline.checks import MAX_STOPS
from paceline.server.protocol.answers import SpeculationStats, TokenLogprob
from paceline.server.protocol.requests import (
    MAX_TOP_LOGPROBS,
    PredictionOptions,
    RequestPart,
    SpeculationOptions,
    Texts,
    within,
)


class OllamaOptions(RequestPart):
    temperature: float | None = within("0: always the most likely token", minimum=0, maximum=100)
    top_p: float | None = within(exclusiveMinimum=0, maximum=1)
    top_k: int | None = within("0 or -1: off", minimum=-1, maximum=2**31)
    min_p: float | None = within(minimum=0, maximum=1)
    seed: int | None = Field(None, description="same seed, same text; -1: any")
    stop: str | Texts | None = within(maxItems=MAX_STOPS)
    num_predict: int | None = Field(None, description="tokens of the answer; 0 or less: no limit")
    repeat_penalty: float | None = within(minimum=0.01, maximum=100)
    presence_penalty: float | None = within(minimum=-100, maximum=100)
    frequency_penalty: float | None = within(minimum=-100, maximum=100)
    draft_num_predict: int | None = within("longest draft in tokens; 0: plain decoding", minimum=0, maximum=1024)


class OllamaRequest(RequestPart):
    """Fields that chats and single prompts share."""

    model: str | None = Field(None, description="the model that is served, with :latest or without; see /api/tags")
    stream: bool | None = Field(None, description="false: one answer; otherwise a line of JSON whenever it grows")
    format: str | dict[str, Any] | None = Field(None, description="json, or a JSON schema that the answer follows")
    options: OllamaOptions | None = None
    keep_alive: str | float | None = Field(None, description="no effect: the model stays loaded")
    think: bool | str | None = Field(None, description="refused unless false: thoughts are not told from the answer")
    logprobs: bool | None = None
    top_logprobs: int | None = within(minimum=0, maximum=MAX_TOP_LOGPROBS)
    speculation: SpeculationOptions | None = None
    prediction: PredictionOptions | None = Field(None, description="what the answer may turn out to be: a draft of it")

    @property
    def streamed(self) -> bool:
        return self.stream is not False


class OllamaFunction(RequestPart):
    name: str
    arguments: dict[str, Any] | None = None
    index: int | None = None


class OllamaCall(RequestPart):
    id: str | None = None
    type: str | None = None
    function: OllamaFunction


class OllamaMessage(RequestPart):
    role: str = Field(description="system, user, assistant or tool; an assistant's last message is continued")
    content: str | None = None
    images: list[Any] | None = Field(None, description="refused: the model reads text")
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = Field(None, description="of a tool's result")
    tool_call_id: str | None = None


class OllamaChatRequest(OllamaRequest):
    messages: list[OllamaMessage] | None = Field(None, description="none: an empty answer, as if to load the model")
    tools: list[dict[str, Any]] | None = within(maxItems=MAX_TOOLS)


class OllamaGenerateRequest(OllamaRequest):
    prompt: str | None = Field(None, description="none: an empty answer, as if to load the model")
    suffix: str | None = Field(None, description="text after the answer, for models that fill in the middle")
    system: str | None = None
    raw: bool | None = Field(None, description="the prompt is the whole text, without the chat template")
    template: str | None = Field(None, description="refused: the template is the model's")
    context: list[int] | None = Field(None, description="refused: send the conversation to /api/chat")
    images: list[Any] | None = Field(None, description="refused: the model reads text")


class ShowRequest(RequestPart):
    model: str | None = None
    name: str | None = Field(None, description="the old name of model")
    verbose: bool | None = None


class OllamaAnswered(BaseModel):
    """Fields of a whole answer and of the last line of a stream."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    logprobs: list[TokenLogprob] | None = None
    speculation: SpeculationStats | None = None
    ignored_fields: list[str] | None = Field(None, description="fields of the request that had no effect")


class OllamaCalled(BaseModel):
    name: str
    arguments: dict[str, Any]
    index: int


class OllamaToolCall(BaseModel):
    id: str
    function: OllamaCalled


class OllamaSaid(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    tool_calls: list[OllamaToolCall] | None = None


class OllamaChatAnswer(OllamaAnswered):
    """The whole answer, or one line of a stream."""

    message: OllamaSaid


class OllamaGenerateAnswer(OllamaAnswered):
    """The whole answer, or one line of a stream."""

    response: str


class ModelDetails(BaseModel):
    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ListedModel(BaseModel):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str = Field(description="names this model by its facts; not the checksum of a file")
    details: ModelDetails


class RunningModel(ListedModel):
    expires_at: str
    size_vram: int
    context_length: int


class ListedModels(BaseModel):
    models: list[ListedModel]


class RunningModels(BaseModel):
    models: list[RunningModel]


class ShownModel(BaseModel):
    modelfile: str
    parameters: str = Field(description="defaults, one a line")
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(BaseModel):
    version: str = Field(description="of Ollama, whose API this is")
    paceline: str
