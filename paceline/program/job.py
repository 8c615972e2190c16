"""The requests of one call on an engine, and what their events say: one of a gen, one for each option of a select."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.errors import EngineDead, InvalidRequest, PacelineError
from paceline.llm import Sample
from paceline.program.call import Call, Usage
from paceline.program.expressions import Gen
from paceline.program.selection import option_scores
from paceline.types import Finish, Request, SequenceStats, TokenEvent


@dataclass(slots=True, eq=False)
class Job:
    call: Call
    requests: Sequence[Request]
    samples: dict[str, Sample] = field(default_factory=dict)  # by request
    logprobs: dict[str, list[float]] = field(default_factory=dict)  # by request that has ended, of its scored tokens

    def take(self, event: TokenEvent, *, dead: str | None) -> None:
        """Add an event of one of the requests. The call ends with the last one, or with an error."""
        if event.finish is Finish.ERROR:
            self.call.fail(_error(event, dead))
            return
        sample = self.samples.setdefault(event.request_id, Sample())
        sample.add(event)
        if isinstance(self.call.ask, Gen):
            self.call.add(event.text)
            if event.finish is not None:
                self.call.end_gen(sample, _usage([sample.stats]))
        elif event.finish is not None:
            self._score(event)

    def _score(self, event: TokenEvent) -> None:
        scored = (event.prompt_logprobs or ())[self.requests[0].scores_from :]
        self.logprobs[event.request_id] = [each.logprob for each in scored if each is not None]
        if len(self.logprobs) == len(self.requests):
            assert not isinstance(self.call.ask, Gen)
            logprobs = [self.logprobs[request.id] for request in self.requests]
            usage = _usage([sample.stats for sample in self.samples.values()])
            self.call.end_select(option_scores(self.call.ask, logprobs), usage)


def _error(event: TokenEvent, dead: str | None) -> PacelineError:
    if dead is None:
        return InvalidRequest(f"the answer could not be completed: {event.error}")
    return EngineDead(f"the engine stopped after an error ({event.error}); load the model anew")


def _usage(stats: Sequence[SequenceStats]) -> Usage:
    return Usage(
        prompt_tokens=sum(each.prompt_tokens for each in stats),
        cached_tokens=sum(each.cached_tokens for each in stats),
        output_tokens=sum(each.output_tokens for each in stats),
        drafted=sum(each.drafted for each in stats),
        accepted=sum(each.accepted for each in stats),
    )
