"""Bodies in the form of llama.cpp's server, for clients that are made for it: /infill, /props, /slots, `timings`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from paceline.server.protocol.requests import First, RequestPart, SamplingOptions, Texts, within


class Timings(BaseModel):
    """Counts and times of an answer, all choices together. Times are milliseconds."""

    cache_n: int = Field(description="tokens of the prompts that were found in the prefix cache")
    prompt_n: int = Field(description="tokens of the prompts that were computed")
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int = Field(description="tokens of the answers")
    predicted_ms: float = Field(description="from the first token to the last")
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int = Field(description="drafted tokens")
    draft_n_accepted: int


class ExtraFile(RequestPart):
    """Another file of the project, or a part of one."""

    text: str
    filename: str | None = None


class InfillRequest(SamplingOptions):
    """A text with a gap. Without `temperature` the most likely text is written."""

    input_prefix: str = Field("", description="the text before the gap")
    input_suffix: str = Field("", description="the text behind the gap")
    input_extra: Annotated[list[ExtraFile], First()] | None = Field(None, description="other files, the nearest last")
    prompt: str | None = Field(None, description="the beginning of the text in the gap, such as that of its line")
    n_predict: int | None = within("-1: until the text is complete; 0: only read the prompt", minimum=-1)
    repeat_penalty: float | None = within("the same as repetition_penalty", minimum=0.01, maximum=100)
    response_fields: Texts | None = Field(None, description="the fields to answer with, such as timings/prompt_n")


class Infilled(BaseModel):
    """The text of a gap, or with `stream` one event of it: `stop` is true in the last."""

    index: int = 0
    content: str
    stop: bool
    model: str | None = None
    tokens_predicted: int | None = None
    tokens_evaluated: int | None = Field(None, description="tokens of the prompt")
    tokens_cached: int | None = Field(None, description="tokens of prompt and answer")
    stop_type: Literal["eos", "limit", "word"] | None = None
    stopping_word: str | None = None
    truncated: bool | None = Field(None, description="the prompt was cut, so that it fits into the context")
    has_new_line: bool | None = None
    timings: Timings | None = None
    speculation: dict[str, Any] | None = Field(None, description="as in an answer to a chat")
    ignored_fields: list[str] | None = None
