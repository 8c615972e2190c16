"""Admission: a request that no step could serve is refused at once; any other becomes sequences."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from paceline.drafters.prediction import Prediction, Trail
from paceline.engine.pooling import Pool
from paceline.engine.sequence import Sequence
from paceline.engine.stats import Counters
from paceline.errors import ContextTooLong, InvalidRequest, UnknownOption
from paceline.sampling.grammar import Grammars
from paceline.sampling.sampler import Sampler, sample_seed
from paceline.text.detokenizer import TextStream
from paceline.text.tokenizer import Tokenizer
from paceline.types import Grammar, Off, OffKind, Request, SamplingParams


@dataclass(slots=True)
class Admission:
    vocab_size: int
    max_context: int
    eos_ids: frozenset[int]
    drafters: Collection[str]
    predictors: Collection[str]  # drafters that need a request's prediction
    default_drafter: str | None
    tokenizer: Tokenizer | None
    grammars: Grammars | None  # None: the engine has no tokenizer
    _keys: Iterator[int] = field(default_factory=itertools.count)

    def sequences(self, request: Request, *, now: float) -> list[Sequence]:
        """Make the n sequences of a request that `check` has passed."""
        seed = request.sampling.seed if request.sampling.seed is not None else secrets.randbits(64)
        drafters = self._drafters_of(request)
        prediction = Prediction(request.prediction) if self._predicting(drafters) else None
        seeds = [sample_seed(seed, i) for i in range(request.sampling.n)]
        made = [self._sequence(request, i, own, drafters, prediction, now) for i, own in enumerate(seeds)]
        for other in made[1:]:
            other.prompt_logprobs = made[0].prompt_logprobs
        return made

    def _sequence(
        self,
        request: Request,
        sample: int,
        seed: int,
        drafters: tuple[str, ...],
        prediction: Prediction | None,
        now: float,
    ) -> Sequence:
        params = request.sampling
        grammar = self.grammars.start(params.grammar) if self.grammars and params.grammar else None
        sampler = Sampler(params, seed=seed, vocab_size=self.vocab_size, eos_ids=self.eos_ids, grammar=grammar)
        sampler.see_prompt(request.prompt)
        length = len(request.prompt) + (self.max_context if params.max_tokens is None else params.max_tokens)
        return Sequence(
            key=next(self._keys),
            request=request,
            sample=sample,
            sampler=sampler,
            stream=self._stream(request),
            tokens=list(request.prompt),
            max_length=min(length, self.max_context),
            stop_ids=frozenset(params.stop_ids) if params.ignore_eos else self.eos_ids | set(params.stop_ids),
            drafters=drafters,
            drafter=next(iter(drafters), None),
            off=None if drafters else self._reason_for_none(request),
            deadline=None if request.deadline is None else now + request.deadline,
            counters=Counters(submitted=now),
            trail=None if prediction is None else Trail(prediction, request.prompt),
            predictors=self._predicting(drafters),
            pool=None if request.pooling is None else Pool(request.pooling, len(request.prompt)),
        )

    def _drafters_of(self, request: Request) -> tuple[str, ...]:
        """Return the drafters of a request in order of preference: its prediction comes before any other drafter."""
        if not request.speculation.enabled:
            return ()
        named = request.speculation.drafter  # it was there when the request was checked, and may be unloaded by now
        other = named if named in self.drafters else self.default_drafter
        first = self.predictors if request.prediction else ()
        return (*first, *([other] if other is not None and other not in self.predictors else []))

    def _predicting(self, drafters: Iterable[str]) -> list[str]:
        return [name for name in drafters if name in self.predictors]

    def _reason_for_none(self, request: Request) -> Off:
        if not request.speculation.enabled and request.arm is not None:
            return Off(OffKind.REQUEST, f"off: the request is in the arm {request.arm.name}, which does not speculate")
        if not request.speculation.enabled:
            return Off(OffKind.REQUEST, "off by request")
        asked = request.speculation.drafter or self.default_drafter
        if asked in self.predictors:
            return Off(OffKind.NO_PREDICTION, "the request has no prediction")
        return Off(OffKind.NO_DRAFTER, "no drafter")

    def _stream(self, request: Request) -> TextStream | None:
        if self.tokenizer is None:
            return None
        params = request.sampling
        return TextStream(
            self.tokenizer,
            stops=params.stop,
            include_stop=params.include_stop,
            stops_from=params.min_tokens,
            continuation=True,
        )

    def check(self, request: Request) -> None:
        """Raise InvalidRequest if no step could ever serve the request. Reads only constant state."""
        params, name = request.sampling, request.speculation.drafter
        self._check_tokens("prompt token", request.prompt, param="prompt")
        self._check_tokens("prediction token", request.prediction, param="prediction")
        self._check_tokens("stop id", params.stop_ids, param="stop_ids")
        self._check_tokens("logit_bias key", params.logit_bias, param="logit_bias")
        self._check_tokens("allowed token", params.allowed_tokens or (), param="allowed_tokens")
        if len(request.prompt) >= self.max_context:
            raise ContextTooLong(
                f"the prompt has {len(request.prompt)} tokens, the context holds {self.max_context} and needs room for "
                "at least one more: shorten the prompt",
                param="prompt",
                owner_advice=" or raise max_context",
            )
        if len(request.prediction) > self.max_context:
            raise ContextTooLong(
                f"the prediction has {len(request.prediction)} tokens, the context holds {self.max_context}: leave out "
                "what cannot be part of the answer",
                param="prediction",
            )
        if params.stop and self.tokenizer is None:
            raise InvalidRequest("stop strings need a tokenizer, and this engine has none: use stop_ids", param="stop")
        if params.grammar is not None:
            self.check_grammar(params.grammar)
        if params.min_tokens and self._allows_only_stops(params):
            raise InvalidRequest(
                "every allowed token is a stop token, which min_tokens forbids: allow one more", param="allowed_tokens"
            )
        if name is not None and name not in self.drafters:
            raise UnknownOption("drafter", name, self.drafters, param="drafter")

    def check_grammar(self, grammar: Grammar) -> None:
        """Compile a grammar, in any thread. A later request with this grammar starts without compiling."""
        if self.grammars is None:
            raise InvalidRequest("a grammar needs a tokenizer, and this engine has none: leave it out", param="grammar")
        self.grammars.compile(grammar)

    def _allows_only_stops(self, params: SamplingParams) -> bool:
        stops = self.eos_ids.union(params.stop_ids)
        return len(stops) == self.vocab_size if params.allowed_tokens is None else stops >= set(params.allowed_tokens)

    def _check_tokens(self, what: str, tokens: Iterable[int], *, param: str) -> None:
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise InvalidRequest(
                    f"{what} {token} is outside of the vocabulary: 0 to {self.vocab_size - 1} are allowed",
                    param=param,
                )


def grammars_of(tokenizer: Tokenizer, *, vocab_size: int, eos_ids: Iterable[int]) -> Grammars:
    """Make grammars over the tokens of the vocabulary that have a text."""
    vocabulary = tokenizer.vocabulary
    return Grammars(
        vocabulary.text_bytes,
        special=vocabulary.special,
        eos_ids=eos_ids,
        vocab_size=vocab_size,
        encode=lambda text: tokenizer.encode_spans(f"\n{text}", [(0, 1, 0)])[1:],  # encode as if after a control token
    )
