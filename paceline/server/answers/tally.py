"""Running totals of one HTTP request, for every endpoint: texts, usage, and the work of speculation.

A `Tally` collects the events of all prompts and samples of the request. It knows the fields that the endpoints share;
the answer classes of this package add the others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from paceline import __version__
from paceline.accept.registry import in_use
from paceline.llm import Sample
from paceline.server.answers.timings import timings
from paceline.server.measured import shown
from paceline.server.protocol.answers import MemberStats, SpeculationStats
from paceline.server.protocol.llama_cpp import Timings
from paceline.server.protocol.requests import ChatRequest, CompletionRequest
from paceline.server.translate.translator import Translation
from paceline.text.detokenizer import IncrementalDecoder
from paceline.text.tokenizer import Tokenizer
from paceline.types import Finish, Logprob, SequenceStats, Speculation, TokenEvent

Fields = dict[str, Any]
FINGERPRINT = f"paceline-{__version__}"


@dataclass(slots=True)
class Choice:
    """One sample of one prompt."""

    index: int  # index among all choices of the request
    prompt: int  # index of its prompt
    decoder: IncrementalDecoder
    sample: Sample = field(default_factory=Sample)
    begun: bool = False  # its first chunk is made
    events: int = 0  # events with tokens, so far
    offset: int = 0  # characters of text before the next token, for log-probabilities

    def texts(self, tokens: Sequence[int]) -> list[str]:
        """Decode new tokens one by one and return the text that each adds. Pass every token once, in order."""
        return [self.decoder.push(token) for token in tokens]

    @property
    def finish_reason(self) -> Literal["stop", "length"]:
        return "length" if self.sample.finish is Finish.LENGTH else "stop"

    @property
    def stop_reason(self) -> str | int | None:
        return self.sample.stop


@dataclass(frozen=True, slots=True)
class Extras:
    """Parts of an answer beside the text that the client asked for."""

    logprobs: bool = False
    token_ids: bool = False
    events: bool = False  # the origins of its tokens, in each chunk
    usage: bool = False  # token counts, in a last chunk
    usage_always: bool = False  # token counts, in each chunk

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
        """True when a token needs a chunk even if it adds no text yet."""
        return self.texts or self.token_ids or self.usage_always

    @property
    def texts(self) -> bool:
        """True when the text of each single token is needed."""
        return self.logprobs or self.events


class Tally:
    def __init__(self, asked: Translation, tokenizer: Tokenizer, *, model: str, extras: Extras | None = None) -> None:
        self.asked = asked
        self.tokenizer = tokenizer
        self.model = model
        self.extras = extras or Extras()
        self.created = int(time.time())
        self.samples = asked.requests[0].sampling.n
        self.prompt_logprobs: dict[int, tuple[Logprob | None, ...]] = {}  # by prompt
        self.choices = [
            Choice(index=i, prompt=i // self.samples, decoder=IncrementalDecoder(tokenizer, continuation=True))
            for i in range(len(asked.requests) * self.samples)
        ]
        self.prompt_tokens = sum(len(request.prompt) for request in asked.requests)
        self.output_tokens = 0  # so far
        self.remarks: Fields = {"ignored_fields": [*asked.ignored]} if asked.ignored else {}  # not yet in a chunk
        self._open = len(self.choices)
        self._first = {request.id: i * self.samples for i, request in enumerate(asked.requests)}  # choice of a prompt

    def choice_of(self, event: TokenEvent) -> Choice:
        """Find the choice that an event belongs to, before the event is counted.

        Log-probabilities of the prompt are kept at once: the first chunk of the choice shows them."""
        choice = self.choices[self._first[event.request_id] + event.sample]
        if event.prompt_logprobs is not None:
            self.prompt_logprobs[choice.prompt] = event.prompt_logprobs
        return choice

    def add(self, event: TokenEvent) -> Choice:
        """Count an event; return its choice."""
        choice = self.choice_of(event)
        choice.sample.add(event)
        choice.events += bool(event.tokens)
        self.output_tokens += len(event.tokens)
        self._open -= event.finish is not None
        return choice

    @property
    def over(self) -> bool:
        """True when every choice has ended."""
        return not self._open

    # Fields that chats and completions share.

    def head(self) -> Fields:
        """Make the fields that every answer and every chunk begins with."""
        return {
            "id": self.asked.id,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }

    def first_chunk(self, fields: Fields) -> Fields:
        """Add usage to the first chunk of a choice, and the remarks to the first chunk of the stream."""
        fields |= self.remarks
        self.remarks = {}
        self._add_usage(fields)
        return fields

    def next_chunk(self, fields: Fields, choice: Choice, event: TokenEvent, texts: list[str]) -> Fields:
        """Add the origins and `texts` of its tokens, usage, and at the end statistics to the chunk of an event."""
        if self.extras.events:
            fields["paceline"] = {
                "round": choice.events,
                "drafter": event.drafter,
                "origins": event.origins,
                "token_texts": texts,
            }
        if not self._open:
            fields["speculation"] = self.speculation().model_dump()
            fields["timings"] = self.timings().model_dump()
        self._add_usage(fields)
        return fields

    def _add_usage(self, fields: Fields) -> None:
        if self.extras.usage_always:
            fields["usage"] = self.usage()
        elif self.extras.usage:
            fields["usage"] = None  # as OpenAI has it: null in all chunks but the last

    def usage(self) -> Fields:
        """Count tokens so far, in the fields of `Usage`. The details are known once every choice has ended."""
        prompt, output = self.prompt_tokens, self.output_tokens
        usage: Fields = {
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

    def timings(self) -> Timings:
        return timings([choice.sample.stats for choice in self.choices], samples=self.samples)

    def speculation(self) -> SpeculationStats:
        """Sum the work of speculation over all choices."""
        asked = self.asked.requests[0].speculation
        all_stats = [choice.sample.stats for choice in self.choices]
        return speculation_stats(all_stats, asked)


def speculation_stats(all_stats: Sequence[SequenceStats], asked: Speculation) -> SpeculationStats:
    rounds, drafted = sum(s.rounds for s in all_stats), sum(s.drafted for s in all_stats)
    accepted, steps = sum(s.accepted for s in all_stats), sum(s.steps for s in all_stats)
    longest = max((len(s.accepted_by_position) for s in all_stats), default=0)
    by_position = [
        sum(s.accepted_by_position[i] for s in all_stats if i < len(s.accepted_by_position)) for i in range(longest)
    ]
    reasons = dict.fromkeys(s.off_reason for s in all_stats if s.off_reason is not None)
    met = [s.target_met for s in all_stats if s.target_met is not None]
    return SpeculationStats(
        enabled=asked.enabled,
        drafter=next((s.drafter for s in all_stats if s.drafter is not None), None),
        arm=next((s.arm.name for s in all_stats if s.arm is not None), None),
        rule=str(in_use(asked.rule)),
        lossless=asked.rule.lossless or not asked.enabled,
        threshold=None if asked.rule.threshold is None else asked.min_likelihood,
        kind=asked.kind,
        num_drafts=rounds,
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        num_accepted_tokens_per_pos=by_position,
        members=_members(all_stats),
        acceptance_rate=accepted / drafted if drafted else 0.0,
        mean_acceptance_length=1 + accepted / rounds if rounds else 0.0,
        tokens_per_step=sum(s.output_tokens for s in all_stats) / steps if steps else 0.0,
        time_draft=sum(s.time_draft for s in all_stats),
        time_verify=sum(s.time_verify for s in all_stats),
        time_to_first_token=min((s.time_to_first for s in all_stats), default=0.0),
        time_total=max((s.time_total for s in all_stats), default=0.0),
        target_tpot_ms=None if asked.target_tpot is None else _milliseconds(asked.target_tpot),
        tpot_ms=max((_milliseconds(s.time_per_token) for s in all_stats if s.time_per_token is not None), default=None),
        target_met=all(met) if met else None,
        pauses=sum(s.pauses for s in all_stats),
        preemptions=sum(s.preemptions for s in all_stats),
        off_reason="; ".join(reasons) or None,
        speedup=shown(all_stats[-1].speedup) if all_stats else None,
        speedup_note=all_stats[-1].unmeasured if all_stats else None,
    )


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 6)


def _members(all_stats: Sequence[SequenceStats]) -> dict[str, MemberStats]:
    """Sum the drafts of a portfolio's members over all answers."""
    found: dict[str, MemberStats] = {}
    for name, (drafted, accepted) in (item for stats in all_stats for item in stats.by_member.items()):
        one = found.setdefault(name, MemberStats(num_draft_tokens=0, num_accepted_tokens=0))
        one.num_draft_tokens += drafted
        one.num_accepted_tokens += accepted
    return found
