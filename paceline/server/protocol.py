"""What clients send and what they get, in OpenAI's words and with the fields that other servers' clients know.

Types of requests are strict: "5" or true is no number. A field that is not listed here never fails a request; it is
kept, so that the answer can name it (`ignored`). Ranges stand here for the OpenAPI document alone (`within`); they are
checked where the values are used, and a test holds the two together.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field

from paceline.chat.tools import MAX_TOOLS
from paceline.checks import MAX_STOPS
from paceline.types import MAX_LOGPROBS, MAX_SAMPLES, THRESHOLDS, Rule

MAX_BIASES = 10_000  # entries of logit_bias
MAX_TOP_LOGPROBS = 20  # OpenAI's, for a chat
RULES = ", ".join(Rule)
LOSSY = " and ".join(THRESHOLDS)


class Wire(BaseModel):
    """A part of a request."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


def within(description: str | None = None, **limits: float) -> Any:
    """An optional field with limits in the words of JSON Schema: documented, not checked."""
    return Field(None, description=description, json_schema_extra=dict(limits))


def ignored(body: Wire, prefix: str = "") -> Iterator[str]:
    """Names of the fields that were sent and that nobody here knows."""
    for name in body.model_extra or ():
        yield prefix + name
    for name in body.model_fields_set & type(body).model_fields.keys():
        part = getattr(body, name)
        if isinstance(part, Wire):
            yield from ignored(part, f"{prefix}{name}.")


def new_id(kind: str) -> str:
    """Make an id as OpenAI writes them: `kind` says of what."""
    return f"{kind}-{uuid.uuid4().hex}"


# ── requests ──


class First(FailFast):
    """One wrong item of a list is enough to say so. Hashable, as members of a union must be."""

    __hash__ = object.__hash__


Texts = Annotated[list[str], First()]
Tokens = Annotated[list[int], First()]
Prompt = str | Tokens | Texts | Annotated[list[Tokens], First()]


class StreamOptions(Wire):
    include_usage: bool | None = Field(None, description="a last chunk with the usage, before [DONE]")
    continuous_usage_stats: bool | None = Field(None, description="the usage so far in every chunk")


class SpeculationOptions(Wire):
    """What is asked of speculation. It never changes the text, unless a lossy rule is asked for; what is not given is
    the server's choice."""

    enabled: bool | None = None
    drafter: str | None = Field(None, description="the name of a drafter that is loaded; see /v1/speculation")
    max_draft: int | None = within("longest draft in tokens", minimum=1, maximum=1024)
    rule: str | None = Field(None, description=f"how drafts are accepted: {RULES}")
    threshold: float | None = within(
        f"how likely a token must be, of the lossy rules {LOSSY}", exclusiveMinimum=0, maximum=1
    )
    p_min: float | None = within("a draft ends once its drafter believes less in it", minimum=0, maximum=1)


class ContentPart(Wire):
    type: str
    text: str | None = None


class PredictionOptions(Wire):
    """A text that much of the answer is expected to repeat, such as a file that is to be edited."""

    type: str = Field(description="content")
    content: str | list[ContentPart]


class PacelineOptions(Wire):
    """Paceline's own."""

    events: bool | None = Field(None, description="say in every chunk how its tokens came about")


class FormatOptions(Wire):
    """The form of an answer."""

    type: str = Field(description="text, json_object, json_schema or regex")
    json_schema: dict[str, Any] | None = Field(None, description='{"name": …, "schema": {…}}')
    pattern: str | None = Field(None, description="of type regex")


class SamplingOptions(Wire):
    """What every endpoint that makes text knows."""

    model: str | None = Field(None, description="the model that is served; see /v1/models")
    temperature: float | None = within("0: always the most likely token", minimum=0, maximum=100)
    top_p: float | None = within(exclusiveMinimum=0, maximum=1)
    top_k: int | None = within("0 or -1: off", minimum=-1, maximum=2**31)
    min_p: float | None = within(minimum=0, maximum=1)
    repetition_penalty: float | None = within(minimum=0.01, maximum=100)
    presence_penalty: float | None = within(minimum=-100, maximum=100)
    frequency_penalty: float | None = within(minimum=-100, maximum=100)
    logit_bias: Annotated[dict[str, float], First()] | None = within("token id → bias", maxProperties=MAX_BIASES)
    allowed_token_ids: Tokens | None = within(minItems=1)
    min_tokens: int | None = within(minimum=0, maximum=2**31)
    stop: str | Texts | None = within(minLength=1, maxItems=MAX_STOPS)
    stop_token_ids: Tokens | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    seed: int | None = within("same seed, same text", minimum=0, maximum=2**64 - 1)
    prompt_logprobs: int | None = within(minimum=0, maximum=MAX_LOGPROBS)
    stream: bool | None = None
    user: str | None = None
    cache_salt: str | None = Field(None, description="prefixes are shared only within one salt")
    return_token_ids: bool | None = None
    speculation: SpeculationOptions | None = None
    prediction: PredictionOptions | None = Field(None, description="what the answer may turn out to be: a draft of it")
    paceline: PacelineOptions | None = None


class Message(Wire):
    role: str = Field(description="system, developer, user, assistant or tool")
    content: str | list[ContentPart] | None = None


class ChatRequest(SamplingOptions):
    messages: list[Message] = Field(json_schema_extra={"minItems": 1})
    max_tokens: int | None = within("the old name of max_completion_tokens", minimum=1)
    max_completion_tokens: int | None = within("none: until a stop or the end of the context", minimum=1)
    n: int | None = within(minimum=1, maximum=MAX_SAMPLES)
    logprobs: bool | None = None
    top_logprobs: int | None = within(minimum=0, maximum=MAX_TOP_LOGPROBS)
    stream_options: StreamOptions | None = None
    response_format: FormatOptions | None = None
    tools: list[dict[str, Any]] | None = within(maxItems=MAX_TOOLS)
    tool_choice: str | dict[str, Any] | None = None
    chat_template: Any = Field(None, description="refused: the template is the model's")
    chat_template_kwargs: Any = Field(None, description="refused")


class CompletionRequest(SamplingOptions):
    prompt: Prompt = Field(
        description="a text, token ids, or a list of either", json_schema_extra={"minLength": 1, "minItems": 1}
    )
    max_tokens: int | None = within("16 where it is not given", minimum=1)
    n: int | None = within(minimum=1, maximum=MAX_SAMPLES)
    best_of: int | None = Field(None, description="as many as n")
    logprobs: int | None = within(minimum=0, maximum=MAX_LOGPROBS)
    echo: bool | None = None
    suffix: str | None = Field(None, description="refused: text is made forwards only")
    stream_options: StreamOptions | None = None
    response_format: FormatOptions | None = None


class InputItem(Wire):
    """A message, a call that the model made, or what came of one."""

    type: str | None = Field(None, description="message, function_call or function_call_output")
    role: str | None = Field(None, description="of a message")
    content: str | list[ContentPart] | None = Field(None, description="of a message")
    call_id: str | None = Field(None, description="of a call, and of what came of it")
    name: str | None = Field(None, description="of a call")
    arguments: str | None = Field(None, description="of a call, as JSON")
    output: str | list[ContentPart] | None = Field(None, description="what came of a call")


class TextOptions(Wire):
    format: dict[str, Any] | None = Field(None, description="text, json_object, json_schema or regex")


class ResponsesRequest(SamplingOptions):
    input: str | list[InputItem] = Field(json_schema_extra={"minLength": 1, "minItems": 1})
    instructions: str | None = None
    max_output_tokens: int | None = within(minimum=1)
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = within(maxItems=MAX_TOOLS)
    tool_choice: str | dict[str, Any] | None = None
    previous_response_id: str | None = Field(None, description="refused: nothing is kept; send the whole conversation")
    metadata: dict[str, str] | None = None


class TokenizeRequest(Wire):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = Field(None, description="frame a prompt as the model wants it (the default)")
    add_generation_prompt: bool | None = Field(None, description="end messages where the answer begins (the default)")
    return_token_strs: bool | None = None


class DetokenizeRequest(Wire):
    model: str | None = None
    tokens: Tokens


# ── answers ──


class PromptDetails(BaseModel):
    cached_tokens: int


class CompletionDetails(BaseModel):
    accepted_prediction_tokens: int = Field(description="of the answer, drafted from the request's prediction")
    rejected_prediction_tokens: int = Field(description="drafted from it in vain")
    reasoning_tokens: int = 0


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None


class SpeculationStats(BaseModel):
    """What speculation did for the answers of one request, all together. Times are seconds."""

    enabled: bool
    drafter: str | None
    rule: str
    lossless: bool = Field(description="false: the text may not be the one that the target alone would have written")
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: list[int]
    acceptance_rate: float = Field(description="accepted tokens a drafted one")
    mean_acceptance_length: float = Field(description="tokens a round, with the target's own; 0 without rounds")
    tokens_per_step: float = Field(description="1 is plain decoding")
    time_draft: float
    time_verify: float
    time_to_first_token: float
    time_total: float
    pauses: int
    preemptions: int
    off_reason: str | None = Field(description="why the last step that could have drafted did not")


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]


class CompletionLogprobs(BaseModel):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]

    def followed_by(self, other: CompletionLogprobs) -> CompletionLogprobs:
        return CompletionLogprobs(
            text_offset=self.text_offset + other.text_offset,
            token_logprobs=self.token_logprobs + other.token_logprobs,
            tokens=self.tokens + other.tokens,
            top_logprobs=self.top_logprobs + other.top_logprobs,
        )


class PromptScore(BaseModel):
    logprob: float
    rank: int = Field(description="1: the most likely")
    decoded_token: str


PromptScores = list[dict[str, PromptScore] | None]


class ChunkEvents(BaseModel):
    """How the tokens of a chunk came about."""

    round: int = Field(description="steps of this sample so far")
    drafter: str | None = Field(description="whose draft was verified; null: there was none, or a grammar forced it")
    origins: list[Literal["accepted", "bonus", "plain"]]
    token_texts: list[str]


class Answered(BaseModel):
    """What every answer says beside OpenAI's fields."""

    id: str
    created: int
    model: str
    usage: Usage | None = None
    speculation: SpeculationStats | None = None
    ignored_fields: list[str] | None = Field(None, description="fields of the request that had no effect")


class FunctionCall(BaseModel):
    name: str | None = None
    arguments: str | None = None


class ToolCall(BaseModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = Field(None, description="in chunks only")


class ChatMessage(BaseModel):
    role: str | None = None
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None = Field(None, description="the stop string or token id that ended it")
    token_ids: list[int] | None = None


class ChatCompletion(Answered):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    system_fingerprint: str | None = None
    prompt_logprobs: PromptScores | None = None
    prompt_token_ids: list[int] | None = None


class ChatDelta(BaseModel):
    index: int
    delta: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatChunk(Answered):
    """One event of a stream."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatDelta]
    system_fingerprint: str | None = None
    prompt_logprobs: PromptScores | None = None
    prompt_token_ids: list[int] | None = None
    paceline: ChunkEvents | None = None


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptScores | None = None


class Completion(Answered):
    """The whole answer, or one event of a stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    system_fingerprint: str | None = None
    paceline: ChunkEvents | None = None


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class OutputCall(BaseModel):
    id: str
    type: Literal["function_call"] = "function_call"
    call_id: str
    name: str
    arguments: str
    status: Literal["in_progress", "completed", "incomplete"]


class InputDetails(BaseModel):
    cached_tokens: int


class OutputDetails(BaseModel):
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class ResponsesUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseObject(BaseModel):
    id: str
    object: Literal["response"] = "response"
    created_at: float
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[OutputMessage | OutputCall]
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = False
    previous_response_id: None = None
    store: bool = False
    temperature: float | None = None
    text: dict[str, Any] = {"format": {"type": "text"}}
    tool_choice: str | dict[str, Any] = "none"
    tools: list[Any] = []
    top_p: float | None = None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None = None
    speculation: SpeculationStats | None = None
    ignored_fields: list[str] | None = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "paceline"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None
    ignored_fields: list[str] | None = None


class Detokenized(BaseModel):
    prompt: str
    ignored_fields: list[str] | None = None


class Health(BaseModel):
    status: Literal["starting", "ready", "draining", "dead"]


class Version(BaseModel):
    version: str
