"""Bodies that clients send.

Types are strict: "5" or true is no number. A field that is not listed here never fails a request; it is kept, so that
the answer can name it (`ignored`). Ranges serve the OpenAPI document alone (`within`): values are checked where they
are used, and a test checks that both agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field

from paceline.chat.tools import MAX_TOOLS
from paceline.checks import MAX_STOPS
from paceline.rules import BUILT_IN
from paceline.types import MAX_LOGPROBS, MAX_SAMPLES, MAX_TARGET_TPOT
from paceline.work_kinds import WorkKind

MAX_BIASES = 10_000  # entries of logit_bias
MAX_TOP_LOGPROBS = 20  # OpenAI's limit for a chat
MAX_IGNORED = 64  # names listed in ignored_fields
MAX_IGNORED_LENGTH = 100  # characters of a name listed there
RULES = ", ".join(BUILT_IN)
PARSE_SPECIAL = "read texts of control tokens in a prompt, such as <|im_start|>, as these; otherwise they are text"
TOOL_CHOICE = "auto, none, required, a function by name, or allowed_tools"
LOSSY = ", ".join(rule for rule in BUILT_IN if not rule.lossless)


class RequestPart(BaseModel):
    """A part of a request."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


def within(description: str | None = None, **limits: float) -> Any:
    """Make an optional field with limits in the words of JSON Schema: documented, not checked."""
    return Field(None, description=description, json_schema_extra=dict(limits))


def ignored(body: RequestPart, prefix: str = "") -> Iterator[str]:
    """Yield the names of fields that were sent and are unknown here. Inside a body, a field without a value counts as
    not sent: clients send back what they were answered."""
    for name, value in (body.model_extra or {}).items():
        if not prefix or value not in (None, [], {}, ""):
            yield prefix + name
    for name in type(body).model_fields:
        if name in body.model_fields_set:
            yield from _ignored_in(getattr(body, name), prefix + name)


def _ignored_in(part: Any, path: str) -> Iterator[str]:
    if isinstance(part, RequestPart):
        yield from ignored(part, f"{path}.")
    elif isinstance(part, list) and part and isinstance(part[0], RequestPart):
        for i, item in enumerate(part):
            yield from ignored(item, f"{path}[{i}].")


def listed(names: Iterable[str]) -> list[str]:
    """Sort names for `ignored_fields`: the first `MAX_IGNORED`, long ones cut, and then how many more there are."""
    rest = iter(names)
    shown = sorted({_cut(name) for name in islice(rest, MAX_IGNORED)})
    more = sum(1 for _ in rest)
    return [*shown, f"… and {more} more"] if more else shown


def _cut(name: str) -> str:
    return name if len(name) <= MAX_IGNORED_LENGTH else name[: MAX_IGNORED_LENGTH - 1] + "…"


class First(FailFast):
    """Stops at the first wrong item of a list. Hashable, as members of a union must be."""

    __hash__ = object.__hash__


Texts = Annotated[list[str], First()]
Tokens = Annotated[list[int], First()]
Prompt = str | Tokens | Texts | Annotated[list[Tokens], First()]


class StreamOptions(RequestPart):
    include_usage: bool | None = Field(None, description="a last chunk with the usage, before [DONE]")
    continuous_usage_stats: bool | None = Field(None, description="the usage so far in every chunk")


class SpeculationOptions(RequestPart):
    """Wishes about speculation. It never changes the text, unless a lossy rule is asked for; what is not given is
    the server's choice."""

    enabled: bool | None = None
    drafter: str | None = Field(None, description="the name of a drafter that is loaded; see /v1/speculation")
    max_draft: int | None = within("longest draft in tokens", minimum=1, maximum=1024)
    rule: str | None = Field(None, description=f"how drafts are accepted: {RULES}")
    threshold: float | str | None = within(
        f"how likely a token must be, of the lossy rules {LOSSY}: a number, or a kind of work: {', '.join(WorkKind)}",
        exclusiveMinimum=0,
        maximum=1,
    )
    p_min: float | None = within("a draft ends once its drafter believes less in it", minimum=0, maximum=1)
    target_tpot_ms: float | None = within(
        "time per output token after the first that is wanted, in milliseconds; it changes no text",
        exclusiveMinimum=0,
        maximum=MAX_TARGET_TPOT * 1000,
    )


class ContentPart(RequestPart):
    type: str
    text: str | None = None
    refusal: str | None = Field(None, description="of type refusal, in a message of the assistant")
    annotations: Any = Field(None, description="as an answer has it; without effect")
    logprobs: Any = Field(None, description="as an answer has it; without effect")


class PredictionOptions(RequestPart):
    """A text that much of the answer is expected to repeat, such as a file that is to be edited."""

    type: str = Field(description="content")
    content: str | list[ContentPart]


class PacelineOptions(RequestPart):
    """Paceline's own."""

    events: bool | None = Field(None, description="say in every chunk how its tokens came about")


class FormatOptions(RequestPart):
    """The form of an answer."""

    type: str = Field(description="text, json_object, json_schema or regex")
    json_schema: dict[str, Any] | None = Field(None, description='{"name": …, "schema": {…}}')
    pattern: str | None = Field(None, description="of type regex")


class SamplingOptions(RequestPart):
    """Fields of every endpoint that makes text."""

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
    seed: int | None = within("same seed, same text", minimum=-(2**63), maximum=2**64 - 1)
    prompt_logprobs: int | None = within(minimum=0, maximum=MAX_LOGPROBS)
    stream: bool | None = None
    user: str | None = None
    cache_salt: str | None = Field(None, description="prefixes are shared only within one salt")
    return_token_ids: bool | None = None
    speculation: SpeculationOptions | None = None
    prediction: PredictionOptions | None = Field(None, description="what the answer may turn out to be: a draft of it")
    paceline: PacelineOptions | None = None


class Message(RequestPart):
    role: str = Field(description="system, developer, user, assistant or tool")
    content: str | list[ContentPart] | None = None
    refusal: str | None = Field(default=None, description="of an assistant that said nothing else")
    tool_calls: Any = Field(default=None, description="calls that the assistant made, as an answer has them")
    tool_call_id: Any = Field(default=None, description="of a tool's message: the call that it answers")


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
    continue_final_message: bool | None = Field(None, description="the last message is the beginning of the answer")
    tool_choice: str | dict[str, Any] | None = Field(None, description=TOOL_CHOICE)
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call in an answer")
    chat_template: Any = Field(None, description="refused: the template is the model's")
    chat_template_kwargs: Any = Field(None, description="refused")


class CompletionRequest(SamplingOptions):
    prompt: Prompt = Field(
        description="a text, token ids, or a list of either", json_schema_extra={"minLength": 1, "minItems": 1}
    )
    max_tokens: int | None = within("16 where it is not given; 0 with echo: the prompt alone, scored", minimum=0)
    n: int | None = within(minimum=1, maximum=MAX_SAMPLES)
    best_of: int | None = Field(None, description="as many as n")
    logprobs: int | None = within(minimum=0, maximum=MAX_LOGPROBS)
    echo: bool | None = None
    parse_special: bool | None = Field(None, description=PARSE_SPECIAL)
    suffix: str | None = Field(
        None, description="the text behind the answer, for models with fill-in-the-middle tokens"
    )
    stream_options: StreamOptions | None = None
    response_format: FormatOptions | None = None


class InputItem(RequestPart):
    """A message, a call that the model made, what came of one, or reasoning, which has no effect."""

    type: str | None = Field(None, description="message, function_call, function_call_output or reasoning")
    id: str | None = Field(None, description="as an answer has it; without effect")
    status: str | None = Field(None, description="as an answer has it; without effect")
    role: str | None = Field(None, description="of a message")
    content: str | list[ContentPart] | None = Field(None, description="of a message")
    call_id: str | None = Field(None, description="of a call, and of what came of it")
    name: str | None = Field(None, description="of a call")
    arguments: str | None = Field(None, description="of a call, as JSON")
    output: str | list[ContentPart] | None = Field(None, description="what came of a call")
    summary: Any = Field(None, description="of reasoning")
    encrypted_content: Any = Field(None, description="of reasoning")


class TextOptions(RequestPart):
    format: dict[str, Any] | None = Field(None, description="text, json_object, json_schema or regex")


class ResponsesRequest(SamplingOptions):
    input: str | list[InputItem] = Field(json_schema_extra={"minLength": 1, "minItems": 1})
    instructions: str | None = None
    max_output_tokens: int | None = within(minimum=1)
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = within(maxItems=MAX_TOOLS)
    tool_choice: str | dict[str, Any] | None = Field(None, description=TOOL_CHOICE)
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call in an answer")
    previous_response_id: str | None = Field(None, description="refused: nothing is kept; send the whole conversation")
    metadata: dict[str, str] | None = None


class TokenizeRequest(RequestPart):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = Field(None, description="frame a prompt as the model wants it (the default)")
    parse_special: bool | None = Field(None, description=PARSE_SPECIAL)
    add_generation_prompt: bool | None = Field(None, description="end messages where the answer begins (the default)")
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestPart):
    model: str | None = None
    tokens: Tokens
