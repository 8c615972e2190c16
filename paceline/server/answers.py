"""From events of the engine to what a client reads: texts, log-probabilities, usage, and what speculation did.

A `Tally` collects the events of all prompts and samples of one request. What is common to the endpoints is made of it
here; the shape that each gives it stands with its route.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from paceline import __version__
from paceline.llm import Sample
from paceline.server.protocol import (
    Answered,
    ChatLogprobs,
    ChatRequest,
    CompletionLogprobs,
    CompletionRequest,
    PromptScore,
    PromptScores,
    SpeculationStats,
    TokenLogprob,
    TopLogprob,
)
from paceline.server.translate import Asked
from paceline.text.detokenizer import IncrementalDecoder
from paceline.text.tokenizer import Tokenizer
from paceline.types import Finish, Logprob, Rule, SequenceStats, TokenEvent

FINGERPRINT = f"paceline-{__version__}"
LOWEST = -9999.0  # what OpenAI's API writes for a probability of zero: JSON has no infinity


@dataclass(slots=True)
class Choice:
    """One sample of one prompt."""

    index: int  # over all prompts
    prompt: int  # which of them
    decoder: IncrementalDecoder
    sample: Sample = field(default_factory=Sample)
    begun: bool = False  # in a stream: its first chunk was sent
    events: int = 0  # so far
    offset: int = 0  # characters of text before the next token, for log-probabilities

    def texts(self, tokens: Iterable[int]) -> list[str]:
        """What each token adds to the text; to be asked once for every token."""
        return [self.decoder.push(token) for token in tokens]

    @property
    def finish_reason(self) -> Literal["stop", "length"]:
        return "length" if self.sample.finish is Finish.LENGTH else "stop"

    @property
    def stop_reason(self) -> str | int | None:
        return self.sample.stop


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a client wants to see beside the text."""

    logprobs: bool
    token_ids: bool
    events: bool  # how tokens came about, in chunks
    usage: bool  # in a last chunk
    usage_always: bool  # in every chunk

    @classmethod
    def of(cls, body: ChatRequest | CompletionRequest) -> Self:
        options = body.stream_options
        return cls(
            logprobs=body.logprobs is not None and body.logprobs is not False,
            token_ids=bool(body.return_token_ids),
            events=bool(body.paceline and body.paceline.events),
            usage=bool(options and options.include_usage),
            usage_always=bool(options and options.continuous_usage_stats),
        )

    @property
    def tokens(self) -> bool:
        """Also of tokens that add no text yet."""
        return self.texts or self.token_ids or self.usage_always

    @property
    def texts(self) -> bool:
        """What each token adds to the text."""
        return self.logprobs or self.events


class Tally:
    def __init__(self, asked: Asked, tokenizer: Tokenizer, *, model: str) -> None:
        self.asked = asked
        self.tokenizer = tokenizer
        self.model = model
        self.created = int(time.time())
        self.samples = asked.requests[0].sampling.n
        self.prompt_logprobs: dict[int, tuple[Logprob | None, ...]] = {}  # by prompt
        self.choices = [
            Choice(index=i, prompt=i // self.samples, decoder=IncrementalDecoder(tokenizer, continuation=True))
            for i in range(len(asked.requests) * self.samples)
        ]
        self.prompt_tokens = sum(len(request.prompt) for request in asked.requests)
        self.output_tokens = 0  # so far
        self._open = len(self.choices)
        self._first = {request.id: i * self.samples for i, request in enumerate(asked.requests)}  # choice of a prompt

    def meet(self, event: TokenEvent) -> Choice:
        """The choice that an event speaks of, with what it knows of the prompt; what it adds is not counted yet."""
        choice = self.choices[self._first[event.request_id] + event.sample]
        if event.prompt_logprobs is not None:
            self.prompt_logprobs[choice.prompt] = event.prompt_logprobs
        return choice

    def add(self, event: TokenEvent) -> Choice:
        choice = self.meet(event)
        choice.sample.add(event)
        choice.events += bool(event.tokens)
        self.output_tokens += len(event.tokens)
        self._open -= event.finish is not None
        return choice

    @property
    def over(self) -> bool:
        return not self._open

    def head(self) -> dict[str, Any]:
        """The fields that every answer and every chunk begins with."""
        return {
            "id": self.asked.id,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }

    def remark(self, made: Answered) -> None:
        """What is said once: fields that had no effect."""
        if self.asked.ignored:
            made.ignored_fields = list(self.asked.ignored)

    def usage(self) -> dict[str, Any]:
        """Tokens so far, as `Usage` has it; the details are known when all is over."""
        prompt, output = self.prompt_tokens, self.output_tokens
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
        }
        if self.over:
            stats = [choice.sample.stats for choice in self.choices]
            usage["prompt_tokens_details"] = {
                "cached_tokens": sum(each.cached_tokens for each in stats[:: self.samples])
            }
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": sum(each.prediction_accepted for each in stats),
                "rejected_prediction_tokens": sum(each.prediction_rejected for each in stats),
            }
        return usage

    def speculation(self) -> SpeculationStats:
        asked = self.asked.requests[0].speculation
        all_stats = [choice.sample.stats for choice in self.choices]
        return speculation_stats(all_stats, enabled=asked.enabled, rule=asked.rule)


def speculation_stats(all_stats: Sequence[SequenceStats], *, enabled: bool, rule: Rule) -> SpeculationStats:
    rounds, drafted = sum(s.rounds for s in all_stats), sum(s.drafted for s in all_stats)
    accepted, steps = sum(s.accepted for s in all_stats), sum(s.steps for s in all_stats)
    longest = max((len(s.accepted_by_position) for s in all_stats), default=0)
    by_position = [
        sum(s.accepted_by_position[i] for s in all_stats if i < len(s.accepted_by_position)) for i in range(longest)
    ]
    reasons = dict.fromkeys(s.off_reason for s in all_stats if s.off_reason is not None)
    return SpeculationStats(
        enabled=enabled,
        drafter=next((s.drafter for s in all_stats if s.drafter is not None), None),
        rule=str(rule),
        lossless=rule.lossless or not enabled,
        num_drafts=rounds,
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        num_accepted_tokens_per_pos=by_position,
        acceptance_rate=accepted / drafted if drafted else 0.0,
        mean_acceptance_length=1 + accepted / rounds if rounds else 0.0,
        tokens_per_step=sum(s.output_tokens for s in all_stats) / steps if steps else 0.0,
        time_draft=sum(s.time_draft for s in all_stats),
        time_verify=sum(s.time_verify for s in all_stats),
        time_to_first_token=min((s.time_to_first for s in all_stats), default=0.0),
        time_total=max((s.time_total for s in all_stats), default=0.0),
        pauses=sum(s.pauses for s in all_stats),
        preemptions=sum(s.preemptions for s in all_stats),
        off_reason="; ".join(reasons) or None,
    )


# ── log-probabilities ──


def chat_logprobs(scores: Sequence[Logprob], tokenizer: Tokenizer) -> ChatLogprobs:
    content = []
    for score in scores:
        own = _top(score.token, score.logprob, tokenizer)
        top = [_top(token, logprob, tokenizer) for token, logprob in score.top]
        content.append(TokenLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top))
    return ChatLogprobs(content=content)


def completion_logprobs(
    tokens: Sequence[int],
    scores: Sequence[Logprob | None],
    texts: Sequence[str],
    tokenizer: Tokenizer,
    *,
    offset: int,
) -> CompletionLogprobs:
    """In the old format; the first token of a prompt has no score. `texts`: what each token adds to the text, which
    begins at character `offset`."""
    made = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for token, score, text in zip(tokens, scores, texts, strict=True):
        made.tokens.append(token_name(token, tokenizer))
        made.text_offset.append(offset)
        made.token_logprobs.append(None if score is None else _finite(score.logprob))
        made.top_logprobs.append(None if score is None else _alternatives(score, tokenizer))
        offset += len(text)
    return made


def prompt_scores(scores: Sequence[Logprob | None], tokenizer: Tokenizer) -> PromptScores:
    """vLLM's format: by token id, the prompt's own token and the best ones."""
    return [None if score is None else _ranked(score, tokenizer) for score in scores]


def token_name(token: int, tokenizer: Tokenizer) -> str:
    """The text of a token; of one that is no whole character, its bytes, so that two of them differ."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _top(token: int, logprob: float, tokenizer: Tokenizer) -> TopLogprob:
    data = tokenizer.token_bytes(token)
    return TopLogprob(token=data.decode(errors="replace"), logprob=_finite(logprob), bytes=list(data))


def _alternatives(score: Logprob, tokenizer: Tokenizer) -> dict[str, float]:
    """The best ones and the token itself, as OpenAI has it."""
    pairs = [*score.top, (score.token, score.logprob)]
    return {token_name(token, tokenizer): _finite(logprob) for token, logprob in pairs}


def _ranked(score: Logprob, tokenizer: Tokenizer) -> dict[str, PromptScore]:
    ranks = [(score.token, score.logprob, score.rank), *((t, p, rank) for rank, (t, p) in enumerate(score.top))]
    return {
        str(token): PromptScore(logprob=_finite(logprob), rank=rank + 1, decoded_token=token_name(token, tokenizer))
        for token, logprob, rank in ranks
    }


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
