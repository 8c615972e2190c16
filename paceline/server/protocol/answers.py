"""Bodies that clients get."""

from __future__ import annotations

import uuid
from typing import Any, Literal

from pydantic import BaseModel, Field

from paceline.server.protocol.llama_cpp import Timings


def new_id(kind: str) -> str:
    """Make an id in OpenAI's form: `kind`, a hyphen and random hex digits."""
    return f"{kind}-{uuid.uuid4().hex}"


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


class MeasuredSpeedup(BaseModel):
    """Speed over plain decoding, with a 95 % interval: some steps are drawn to run plain, and compared with others."""

    ratio: float = Field(description="1: as fast as plain decoding")
    low: float
    high: float


class GroupSpeedup(BaseModel):
    """Measurements of steps with one drafter, about as many sequences, and one kind of requests."""

    drafter: str
    batch: str = Field(description="sequences: 1, 2, 3-4, 5-8, …")
    kind: str = Field(description="of requests: greedy; or sampled, if the tokens of any of them are")
    speedup: MeasuredSpeedup | None = Field(description="null: still measuring")
    runs: int = Field(description="of plain steps that count; old ones fade")
    tokens_per_step: float | None = Field(description="of a sequence, without the steps drawn to run plain")
    acceptance: float | None = Field(description="accepted tokens a drafted one; null: nothing was drafted")
    off: str | None = Field(description="why nothing is drafted; null: drafts are allowed")


class DraftPrices(BaseModel):
    """Probabilities of being right from which drafting pays; 0: not known."""

    entry: float = Field(description="of drafting at all")
    token: float = Field(description="of one more token")


class MemberStats(BaseModel):
    """Drafts of one member of a portfolio, or of several together."""

    num_draft_tokens: int
    num_accepted_tokens: int


class ArmState(BaseModel):
    """Ended requests of one arm of a canary."""

    requests: int
    tokens: int
    drafted: int
    accepted: int
    tokens_per_second: float | None = Field(description="of decoding; null: nothing was measured")


class CanaryState(BaseModel):
    """A drafter that is tried on a share of the requests, and what was measured."""

    drafter: str
    control: str = Field(description="the default drafter, which the others have")
    phase: str = Field(description="shadow, running, promoted or rolled back")
    reason: str | None = Field(description="why it ended")
    share: float
    by: str
    promote_at: float
    rollback_at: float
    min_requests: int
    started: float = Field(description="seconds since 1970")
    pairs: int = Field(description="of requests that were compared")
    ratio_low: float | None = Field(description="speed over the control's, at least; null: no pair yet")
    ratio_high: float | None
    evidence_faster: float = Field(description="1: enough to promote")
    evidence_slower: float = Field(description="1: enough to roll back")
    arms: dict[str, ArmState]
    shadow: dict[str, float] = Field(description="drafts for ended texts before it got traffic, by arm")


class SpeculationStats(BaseModel):
    """Statistics of speculation over all answers of one request. Times are seconds."""

    enabled: bool
    drafter: str | None
    arm: str | None = Field(description="canary or control; null: the request was in no canary")
    rule: str
    lossless: bool = Field(description="false: the text may not be the one that the target alone would have written")
    threshold: float | None = Field(description="how likely a token had to be; null where the rule takes no threshold")
    kind: str | None = Field(description="the kind of work that the threshold is for; null: it was given as a number")
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: list[int]
    members: dict[str, MemberStats] = Field(description="drafts of a portfolio, by the members whose tokens they hold")
    acceptance_rate: float = Field(description="accepted tokens a drafted one")
    mean_acceptance_length: float = Field(description="tokens a round, with the target's own; 0 without rounds")
    tokens_per_step: float = Field(description="1 is plain decoding")
    time_draft: float
    time_verify: float
    time_to_first_token: float
    time_total: float
    target_tpot_ms: float | None = Field(description="wanted time per output token after the first; null: no target")
    tpot_ms: float | None = Field(description="that time, of the slowest choice; null: no choice has a second token")
    target_met: bool | None = Field(description="whether every choice kept to the target; null: nothing to compare")
    pauses: int
    preemptions: int
    off_reason: str | None = Field(description="why the last step that could have drafted did not")
    speedup: MeasuredSpeedup | None = Field(description="of its drafter and batch size when it ended; null: see note")
    speedup_note: str | None = Field(description="why there is no measured speed-up")


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
    """Fields of every answer beside OpenAI's."""

    id: str
    created: int
    model: str
    usage: Usage | None = None
    speculation: SpeculationStats | None = None
    timings: Timings | None = None
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


class ModelFacts(BaseModel):
    """Facts of a model as it runs here. The first five have llama.cpp's names."""

    n_params: int = Field(description="weights in all")
    size: int = Field(description="bytes of the weights in memory")
    n_ctx_train: int = Field(description="tokens of context that the model knows; `max_model_len` is what is served")
    n_vocab: int
    n_embd: int
    architecture: str
    bits_per_weight: float = Field(description="mean over all weights, scales included")
    formats: dict[str, int] = Field(description="format of weights: bytes in it")
    device: str
    device_name: str = Field(description="the device, for people")
    kernels: str = Field(description="the kernels that run the model, and why")
    drafters: dict[str, str] = Field(description="loaded drafter: what it is, for people; the default one is first")
    default_sampling: dict[str, float] = Field(description="sampling parameters of requests that send none")


class ModelCard(BaseModel):
    """A model, in OpenAI's fields and in Anthropic's."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "paceline"
    max_model_len: int
    type: Literal["model"] = "model"
    display_name: str
    created_at: str = Field(description="as `created`, in Anthropic's form")
    max_input_tokens: int = Field(description="as `max_model_len`, in Anthropic's words")
    meta: ModelFacts


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
    has_more: bool = False
    first_id: str
    last_id: str


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
    """The state of the server. While it starts: the share of the weights that is read, and what it does now."""

    status: Literal["starting", "ready", "draining", "dead"]
    percent: int | None = None
    doing: str | None = None


class Version(BaseModel):
    version: str
