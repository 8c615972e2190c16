"""Single fields of bodies: read, checked against each other, and named where they have no effect."""

from __future__ import annotations

from paceline.errors import InvalidRequest
from paceline.server.protocol.llama_cpp import InfillRequest
from paceline.server.protocol.requests import (
    MAX_BIASES,
    MAX_TOP_LOGPROBS,
    ChatRequest,
    CompletionRequest,
    SamplingOptions,
)


def chat_tokens(body: ChatRequest) -> tuple[int | None, list[str]]:
    """Find how many tokens an answer may have, and the fields that have no effect on it."""
    old, new = body.max_tokens, body.max_completion_tokens
    if new is None:
        return old, []
    return new, ["max_tokens"] if old is not None and old != new else []


def infill_tokens(body: InfillRequest, context: int) -> int | None:
    """Find how many tokens a fill-in may have; None: until it is complete, or the context is full. The engine draws at
    least one."""
    asked = body.n_predict
    if asked is not None and asked < -1:
        raise InvalidRequest(f"n_predict must be -1 or more, not {asked}", param="n_predict")
    return None if asked is None or asked < 0 or asked >= context else max(1, asked)


def check_scores_alone(body: SamplingOptions) -> None:
    """Raise InvalidRequest for max_tokens 0, unless the answer is the prompt with its scores."""
    if not isinstance(body, CompletionRequest):
        names = ("max_completion_tokens", "max_output_tokens", "max_tokens")
        name = next((name for name in names if getattr(body, name, None) == 0), "max_tokens")
        raise InvalidRequest(f"{name} must be at least 1, not 0", param=name)
    if not body.echo or body.suffix:
        raise InvalidRequest(
            "max_tokens is 0, and the prompt is not sent back: ask for at least 1, or send echo", param="max_tokens"
        )


def chat_logprobs(body: ChatRequest) -> int | None:
    top = body.top_logprobs
    if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"top_logprobs must be between 0 and {MAX_TOP_LOGPROBS}, not {top}", param="top_logprobs")
    if top and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return (top or 0) if body.logprobs else None


def without_stream(body: ChatRequest | CompletionRequest) -> list[str]:
    """Name `stream_options` if it was given for an answer that is not streamed."""
    return ["stream_options"] if body.stream_options is not None and not body.stream else []


def biases(given: dict[str, float] | None) -> dict[int, float] | None:
    """Read logit_bias, whose keys are token ids as text."""
    if given is None:
        return None
    if len(given) > MAX_BIASES:
        raise InvalidRequest(
            f"logit_bias has {len(given)} entries; at most {MAX_BIASES} are allowed", param="logit_bias"
        )
    for key in given:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise InvalidRequest(f"a logit_bias key must be a token id, not {key[:60]!r}", param="logit_bias")
    return {int(key): bias for key, bias in given.items()}
