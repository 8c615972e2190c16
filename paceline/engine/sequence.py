"""A sequence: the engine's state of one answer, from submission to its last event."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from paceline.drafters.prediction import Trail
from paceline.engine.caution import Caution
from paceline.engine.copying import Copying
from paceline.engine.in_flight import InFlight
from paceline.engine.pace import Pace
from paceline.engine.pooling import Pool
from paceline.engine.stats import Counters
from paceline.kv.cache import Span
from paceline.sampling.sampler import Sampler
from paceline.text.detokenizer import TextStream
from paceline.types import Finish, Logprob, Off, OffKind, Request, Rule, SequenceStats, Speedup


@dataclass(slots=True, eq=False)
class Sequence:
    """One of the n answers to a request. It runs while it has a lane and a span; otherwise it waits, or has ended.

    tokens     0 .... prompt .... output ....│
    computed   0 ........ span.committed     │  `todo` tokens still need a row; 1 when decoding
    in flight                                │ `in_flight.least` to `in_flight.most` tokens more, on a device
    """

    key: int  # unique in the engine
    request: Request
    sample: int
    sampler: Sampler
    stream: TextStream | None  # None: the engine has no tokenizer, events carry no text
    tokens: list[int]
    max_length: int  # tokens of prompt and output together, at most
    stop_ids: frozenset[int]
    drafters: tuple[str, ...]  # drafters it may use, in order of preference
    drafter: str | None  # drafter in use now; None: plain decoding
    off: Off | None  # reason why the sequence does not draft; None: it drafts
    deadline: float | None  # time on the engine's clock; None: no limit
    counters: Counters
    trail: Trail | None = None  # place of the answer in the request's prediction
    predictors: Collection[str] = ()  # drafters of the sequence that need the prediction
    paces: defaultdict[str | None, Pace] = field(default_factory=lambda: defaultdict(Pace))  # by drafter
    paid: int = 0  # tokens from the beginning that its tenant has paid for; 0: it never ran
    lane: int = -1
    span: Span | None = None
    in_flight: InFlight = field(default_factory=InFlight)
    caution: Caution | None = None  # of a sequence with a grammar that runs on a device
    lateness: float = 0.0  # time per output token by the request's target, above 1: late; 0: no target, or not known
    copying: Copying | None = None  # of a sequence that a portfolio on a device drafts for
    finish: Finish | None = None
    stopped_by: str | int | None = None
    error: str | None = None  # error of this sequence alone
    prompt_logprobs: list[Logprob | None] = field(default_factory=list)  # shared by the samples of a request
    pool: Pool | None = None  # hidden states of the prompt, for a request with pooling
    needs_prompt_rows: bool = field(init=False)  # something is computed from each row of the prompt
    prompt_length: int = field(init=False)
    drafting: str = field(init=False)  # its drafters, joined by "+"; empty: none
    drawable: bool = field(init=False)  # its text does not depend on which steps draft
    sampled: bool = field(init=False)  # it is not greedy

    def __post_init__(self) -> None:
        self._name_drafters()
        self.needs_prompt_rows = self.pool is not None or self.wants_prompt_logprobs
        self.prompt_length = len(self.request.prompt)
        self.sampled = not self.request.sampling.greedy

    def _name_drafters(self) -> None:
        rule, greedy = self.request.speculation.rule, self.request.sampling.greedy
        self.drafting = "+".join(self.drafters)
        self.drawable = not self.drafting or rule is Rule.COUPLED or (rule.lossless and greedy)

    def lose(self, name: str, *, successor: str | None) -> None:
        """Go on without a drafter that is unloaded; `successor` takes its place, None: nobody does."""
        mine = (successor if each == name else each for each in self.drafters)
        self.drafters = tuple(dict.fromkeys(each for each in mine if each is not None))
        self._name_drafters()
        self.drafter = next(iter(self.drafters), None)
        self.paces.pop(name, None)
        self.off = None if self.drafters else Off(OffKind.DRAFTER_OUT, f"drafter {name} was unloaded")
        if self.trail is not None:
            self.choose_drafter(self.trail)

    @property
    def todo(self) -> int:
        assert self.span is not None, "a waiting sequence has nothing to do yet"
        state = self.in_flight
        return 1 if state.most else len(self.tokens) - self.span.committed - state.rows

    @property
    def longest(self) -> int:
        """Largest length that the sequence can have once everything in flight has landed."""
        return len(self.tokens) + self.in_flight.most

    @property
    def reusable(self) -> int | None:
        """Tokens of the prompt that may come from the prefix cache; None: all. A token is scored by the row before."""
        if self.pool is not None:
            return 0
        return max(0, self.request.scores_from - 1) if self.scores_prompt else None

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.request.sampling.prompt_logprobs is not None

    @property
    def scores_prompt(self) -> bool:
        """True as long as log-probabilities of the prompt are wanted and not complete."""
        return self.wants_prompt_logprobs and len(self.prompt_logprobs) < self.prompt_length

    @property
    def waits_for_scores(self) -> bool:
        """True as long as the first sample scores the prompt, whose pages and scores the other samples then share."""
        return self.sample > 0 and self.scores_prompt

    @property
    def draws_masked(self) -> bool:
        """True if its next tokens on a device are drawn with the masks of a grammar."""
        return self.caution is not None and self.caution.rounds > 0

    @property
    def pace(self) -> Pace:
        return self.paces[self.drafter]

    def extend(self, tokens: Seq[int]) -> None:
        """Append tokens that were committed."""
        self.tokens += tokens
        self.sampler.advance(tokens)
        if self.trail is not None:
            self.trail.advance(tokens)

    def predicts(self, draft: Seq[int], *, by: str | None) -> bool:
        """Return whether a draft is what the request predicts next, and by a drafter that drafts from that."""
        return self.trail is not None and by in self.predictors and self.trail.leads(draft)

    def choose_drafter(self, trail: Trail) -> None:
        """Choose the drafter: the prediction while the answer follows it on its trail, else the other one, if any."""
        output, lost = len(self.tokens) - self.prompt_length, not trail.ahead(1)
        for name in self.drafters:
            self.drafter = name
            if name not in self.predictors or not (lost or self.paces[name].paused(output)):
                return

    def stats(self, *, now: float, speedup: Speedup | None = None, unmeasured: str | None = None) -> SequenceStats:
        c = self.counters
        return SequenceStats(
            prompt_tokens=self.prompt_length,
            cached_tokens=c.cached_tokens,
            output_tokens=len(self.tokens) - self.prompt_length,
            steps=c.steps,
            rounds=c.rounds,
            drafted=c.drafted,
            accepted=c.accepted,
            accepted_by_position=tuple(c.accepted_by_position),
            prediction_accepted=c.prediction_accepted,
            prediction_rejected=c.prediction_rejected,
            drafter=self.drafting or None,
            by_member=dict(c.by_member),
            pauses=sum(pace.pauses for pace in self.paces.values()),
            preemptions=c.preemptions,
            off=self.off,
            time_queued=(now if c.admitted is None else c.admitted) - c.submitted,
            time_to_first=(now if c.first_token is None else c.first_token) - c.submitted,
            time_total=now - c.submitted,
            time_draft=c.time_draft,
            time_verify=c.time_verify,
            speedup=speedup,
            unmeasured=unmeasured,
            arm=self.request.arm,
            arm_speed=max(c.arm_speeds.values(), key=lambda speed: speed.tokens, default=None),
            target_tpot=self.request.speculation.target_tpot,
        )
