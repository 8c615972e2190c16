"""The nouns of the engine: requests and their parameters go in, events and statistics come out.

All are frozen. Those that a caller makes check themselves when they are made, so each object is valid. Nothing here
computes.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Self

from paceline.arms import Arm, ArmSpeed
from paceline.checks import (
    check_flag,
    check_integer,
    check_known,
    check_number,
    check_stops,
    checked_tuple,
    surrogate_at,
)
from paceline.errors import InvalidRequest
from paceline.request_grammar import Grammar as Grammar
from paceline.rules import Rule as Rule  # a noun of requests too
from paceline.rules import with_threshold
from paceline.work_kinds import WorkKind, read_threshold

MAX_LOGPROBS = 100  # alternatives to report for a token
MAX_SAMPLES = 128  # answers to one prompt
MAX_TARGET_TPOT = 600.0  # seconds
MIN_TEMPERATURE = 1e-6  # a lower one takes logits / temperature out of the range of a float32


class Finish(StrEnum):
    """The reason that a sequence ended."""

    STOP = "stop"  # end-of-sequence token, stop id or stop string
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"
    DEADLINE = "deadline"
    ERROR = "error"


class OffKind(StrEnum):
    """Kinds of reasons not to draft, without numbers or names: labels of a metric."""

    REQUEST = "off by request"
    NO_DRAFTER = "no drafter"
    NO_PREDICTION = "no prediction"
    DRAFTER_OUT = "drafter is out"
    BATCH = "too many sequences"
    CONTEXT = "context too long"
    PLAIN_FASTER = "plain is faster"
    WOULD_NOT_PAY = "would not pay"
    LOW_ACCEPTANCE = "low acceptance"
    NO_ROOM = "no room in the step"
    NO_PAGE = "no free page"
    OTHER_TURN = "turn of another drafter"
    GRAMMAR = "grammar"
    BEHIND = "drafter is behind"
    NO_HIDDEN_STATES = "no hidden states"
    MEASURED_SLOWER = "measured slower"


@dataclass(frozen=True, slots=True)
class Off:
    """The reason that a sequence did not draft: a kind to count by, and a sentence for people."""

    kind: OffKind
    detail: str

    def __str__(self) -> str:
        return self.detail


class Origin(StrEnum):
    """The source of an output token."""

    ACCEPTED = "accepted"  # drafted, and the target agreed
    BONUS = "bonus"  # the target's own token after a draft
    PLAIN = "plain"  # no draft was attached


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of sampling, as a request sets them. Each is valid with and without speculation."""

    temperature: float = 1.0  # 0: always the most likely token
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over the output
    frequency_penalty: float = 0.0  # over the output
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_tokens: tuple[int, ...] | None = None  # None: all
    min_tokens: int = 0
    max_tokens: int | None = None  # None: until a stop or the end of the context; 0: the prompt is only scored
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    include_stop: bool = False  # keep the stop string in the text
    ignore_eos: bool = False
    seed: int | None = None  # None: drawn when the request is submitted; a negative one counts as 2^64 more
    n: int = 1
    logprobs: int | None = None  # alternatives to report beside each chosen token; None: report nothing
    prompt_logprobs: int | None = None  # as `logprobs`, for the tokens of the prompt
    grammar: Grammar | None = None  # may end the answer before min_tokens

    @classmethod
    def of(cls, **options: Any) -> Self:
        """Make one from options; a misspelt option raises an error that says what was probably meant."""
        check_known(cls, options)
        return cls(**options)

    def __post_init__(self) -> None:
        stops = (self.stop,) if isinstance(self.stop, str) else checked_tuple("stop", self.stop)
        object.__setattr__(self, "stop", stops)
        object.__setattr__(self, "stop_ids", checked_tuple("stop_ids", self.stop_ids))
        if self.allowed_tokens is not None:
            object.__setattr__(self, "allowed_tokens", checked_tuple("allowed_tokens", self.allowed_tokens))
        self._check_numbers()
        self._check_integers()
        self._check_collections()
        check_flag("include_stop", self.include_stop)
        check_flag("ignore_eos", self.ignore_eos)
        self._check_grammar()

    def _check_grammar(self) -> None:
        if self.grammar is None:
            return
        if not isinstance(self.grammar, Grammar):
            raise InvalidRequest(f"grammar must be a Grammar, not {type(self.grammar).__name__}", param="grammar")
        for name, given in (("ignore_eos", self.ignore_eos), ("allowed_tokens", self.allowed_tokens is not None)):
            if given:
                raise InvalidRequest(
                    f"a grammar decides which tokens follow and where the text ends: leave out {name}", param=name
                )

    def _check_numbers(self) -> None:
        check_number("temperature", self.temperature, 0, 100)
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise InvalidRequest(
                f"temperature must be 0 (always the most likely token) or at least {MIN_TEMPERATURE:g}, "
                f"not {self.temperature!r}",
                param="temperature",
            )
        check_number("top_p", self.top_p, 0, 1, open_low=True)
        check_number("min_p", self.min_p, 0, 1)
        check_number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        check_number("presence_penalty", self.presence_penalty, -100, 100)
        check_number("frequency_penalty", self.frequency_penalty, -100, 100)

    def _check_integers(self) -> None:
        check_integer("top_k", self.top_k, 0, 2**31)
        check_integer("min_tokens", self.min_tokens, 0, 2**31)
        check_integer("n", self.n, 1, MAX_SAMPLES)
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 0, 2**31)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequest(
                    f"min_tokens {self.min_tokens} is larger than max_tokens {self.max_tokens}", param="min_tokens"
                )
        if self.seed is not None:
            check_integer("seed", self.seed, -(2**63), 2**64 - 1)
            object.__setattr__(self, "seed", self.seed % 2**64)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 0, MAX_LOGPROBS)

    def _check_collections(self) -> None:
        check_stops(self.stop)
        for token in self.stop_ids:
            check_integer("a stop id", token, 0, 2**31, param="stop_ids")
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest(
                f"logit_bias must be a mapping from token id to number, not {self.logit_bias!r}", param="logit_bias"
            )
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        for token, bias in self.logit_bias.items():
            check_integer("a logit_bias key", token, 0, 2**31, param="logit_bias")
            check_number("a logit_bias value", bias, -1000, 1000, param="logit_bias")
        if self.allowed_tokens is not None:
            if not self.allowed_tokens:
                raise InvalidRequest(
                    "allowed_tokens must name at least one token, or be None for all", param="allowed_tokens"
                )
            for token in self.allowed_tokens:
                check_integer("an allowed token", token, 0, 2**31, param="allowed_tokens")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def edits_logits(self) -> bool:
        """True if anything besides temperature, filters and noise acts on the logits."""
        return self.grammar is not None or self.shifts_logits

    @property
    def shifts_logits(self) -> bool:
        """True if the request itself, without its grammar, changes or forbids tokens beside temperature and filters."""
        return bool(
            self.logit_bias
            or self.allowed_tokens is not None
            or self.min_tokens
            or self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
        )

    @property
    def filters(self) -> bool:
        return bool(self.top_k or self.top_p < 1 or self.min_p)


@dataclass(frozen=True, slots=True)
class Speculation:
    """Parameters of speculation, as a request sets them."""

    enabled: bool = True
    drafter: str | None = None  # None: the engine's default
    max_draft: int | None = None  # None: the engine's limit
    rule: Rule = Rule.COUPLED
    threshold: float | WorkKind | None = None  # for rules that take one; None: the rule's default
    p_min: float | None = None  # confidence below which a draft ends; None: the drafter's own limit
    target_tpot: float | None = None  # seconds per output token after the first that are wanted; None: as few as can be

    @classmethod
    def of(cls, **options: Any) -> Self:
        """Make one from options; a misspelt option raises an error that says what was probably meant."""
        check_known(cls, options)
        return cls(**options)

    def __post_init__(self) -> None:
        check_flag("enabled", self.enabled)
        if self.drafter is not None and not isinstance(self.drafter, str):
            raise InvalidRequest(f"drafter must be a name, not {self.drafter!r}", param="drafter")
        object.__setattr__(self, "rule", Rule(self.rule))
        if self.max_draft is not None:
            check_integer("max_draft", self.max_draft, 1, 1024)
        if self.p_min is not None:
            check_number("p_min", self.p_min, 0, 1)
        if self.target_tpot is not None:
            check_number("target_tpot", self.target_tpot, 0, MAX_TARGET_TPOT, open_low=True)
        if self.threshold is not None:
            object.__setattr__(self, "threshold", read_threshold(self.threshold))
            if self.rule.threshold is None:
                names = " and ".join(with_threshold())
                raise InvalidRequest(
                    f"threshold is for the rules {names}, not for {self.rule}: leave it out", param="threshold"
                )

    @property
    def min_likelihood(self) -> float:
        """Probability that a drafted token needs, as the rule reads it: the threshold as a number; 0 without one."""
        asked = self.threshold
        return asked.threshold if isinstance(asked, WorkKind) else asked or self.rule.threshold or 0.0

    @property
    def kind(self) -> WorkKind | None:
        """The kind of work that the threshold comes from."""
        return self.threshold if isinstance(self.threshold, WorkKind) else None


OFF = Speculation(enabled=False)
POOLINGS = ("mean", "last")  # ways to make one vector of a text's hidden states
EMBEDDING = SamplingParams(max_tokens=1, temperature=0)  # of a request with pooling: its one token ends it


@dataclass(frozen=True, slots=True)
class Request:
    """One user call, already tokenised."""

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    speculation: Speculation = field(default_factory=Speculation)
    cache_salt: str = ""  # requests share cached prefixes only if their salts are equal
    tenant: str = ""  # on whose behalf: tenants that wait are served alike
    deadline: float | None = None  # seconds from submission
    prediction: tuple[int, ...] = ()  # a guess of the answer: drafts come from it, the text does not
    pooling: str | None = None  # one of POOLINGS: the last event has the embedding of the prompt; None: it has none
    scores_from: int = 0  # first prompt token that `prompt_logprobs` score; those before it may come from the cache
    arm: Arm | None = None  # arm of a canary; None: the request is in none
    kind: WorkKind | None = None  # kind of work, by which past drafts are told apart; None: not known

    def __post_init__(self) -> None:
        if self.kind is WorkKind.AUTO:
            raise InvalidRequest("the kind auto must be resolved to a kind of work first", param="kind")
        for what, tokens in (("prompt", self.prompt), ("prediction", self.prediction)):
            if not isinstance(tokens, tuple):
                raise InvalidRequest(f"a {what} is a tuple of token ids, not {type(tokens).__name__}", param=what)
            for token in tokens:
                if type(token) is not int:
                    raise InvalidRequest(f"a {what} is made of integer token ids, not {token!r}", param=what)
        if not self.prompt:
            raise InvalidRequest("the prompt is empty; give at least one token", param="prompt")
        check_integer("scores_from", self.scores_from, 0, len(self.prompt))
        if self.deadline is not None:
            check_number("deadline", self.deadline, 0, 1e9)
        if self.speculation.threshold is WorkKind.AUTO:
            raise InvalidRequest("the threshold auto must be resolved to a kind of work first", param="threshold")
        if self.pooling is not None and self.pooling not in POOLINGS:
            raise InvalidRequest(f"pooling is {' or '.join(POOLINGS)}, not {self.pooling!r}", param="pooling")
        for name, text in (("id", self.id), ("cache_salt", self.cache_salt), ("tenant", self.tenant)):
            if not isinstance(text, str) or surrogate_at(text) is not None:
                raise InvalidRequest(f"{name} must be a valid Unicode text, not {text!r}", param=name)


class Verdict(NamedTuple):
    """The outcome of verification for one sequence: the accepted path of its draft, and the token after it."""

    path: tuple[int, ...]  # indices into the draft, root first
    token: int


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token under the target, before any sampling parameter, with the likeliest alternatives."""

    token: int
    logprob: float
    rank: int  # 0: the most likely
    top: tuple[tuple[int, float], ...] = ()


class Speedup(NamedTuple):
    """Speed over plain decoding, 1 for the same, with a 95 % interval."""

    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.ratio:.2f} × ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True, slots=True)
class SequenceStats:
    """Counts and times of one sequence. Times are in seconds; a step's time is divided among its sequences by rows."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0  # steps that produced output
    rounds: int = 0  # steps that verified a draft
    drafted: int = 0
    accepted: int = 0
    accepted_by_position: tuple[int, ...] = ()  # [i]: drafts that were accepted up to and including position i
    prediction_accepted: int = 0  # accepted tokens that were drafted from the request's prediction
    prediction_rejected: int = 0  # rejected tokens that were drafted from the prediction
    drafter: str | None = None  # drafters of this sequence, joined by "+"
    by_member: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # drafted and accepted, of a portfolio
    pauses: int = 0  # times that drafting paused because too little was accepted
    preemptions: int = 0
    off: Off | None = None  # reason of the last step that could have drafted and did not
    time_queued: float = 0.0  # from submission to its first step
    time_to_first: float = 0.0  # from submission to its first token
    time_total: float = 0.0
    time_draft: float = 0.0
    time_verify: float = 0.0
    speedup: Speedup | None = None  # measured for its drafter and batch size when it ended
    unmeasured: str | None = None  # why there is no speed-up
    arm: Arm | None = None  # arm of a canary that the request was in
    arm_speed: ArmSpeed | None = None  # speed at the batch size of most of its tokens; None: no arm, or too short
    target_tpot: float | None = None  # wanted time per output token after the first; None: the request has no target

    @property
    def time_per_token(self) -> float | None:
        """Time per output token after the first one; None: there is no other."""
        rest = self.output_tokens - 1
        return (self.time_total - self.time_to_first) / rest if rest > 0 else None

    @property
    def target_met(self) -> bool | None:
        """True if the time per output token is within the request's target. None: it has no target, or one token."""
        spent = self.time_per_token
        return None if self.target_tpot is None or spent is None else spent <= self.target_tpot

    @property
    def off_reason(self) -> str | None:
        """The sentence of `off`, for people."""
        return None if self.off is None else self.off.detail

    @property
    def tokens_per_step(self) -> float:
        """Output tokens per step of the sequence that produced output: 1 is plain decoding."""
        return self.output_tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Deprecated name of `tokens_per_step`."""
        warnings.warn("tokens_per_round is now tokens_per_step", DeprecationWarning, stacklevel=2)
        return self.tokens_per_step

    @property
    def acceptance(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


class TokenEvent(NamedTuple):
    """Output of one sequence in one step. The event with `finish` set is the sequence's last.

    A tuple with names, because every step makes one for each sequence: a frozen dataclass takes four times as long."""

    request_id: str
    sample: int  # 0 … n-1
    tokens: tuple[int, ...] = ()
    origins: tuple[Origin, ...] = ()
    drafter: str | None = None  # the drafter whose draft was verified; None: no draft, or one that a grammar forced
    drafted: int = 0  # tokens of the draft
    accepted: int = 0  # accepted tokens of the draft
    text: str = ""
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[Logprob | None, ...] | None = None  # with the first tokens, and on the last event
    finish: Finish | None = None
    stop: str | int | None = None  # the stop string or token id that ended the sequence
    error: str | None = None
    embedding: tuple[float, ...] | None = None  # on the last event of a request with pooling: a vector of length 1
    stats: SequenceStats | None = None  # on the last event
