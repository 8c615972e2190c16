"""The offline face of Paceline: load a target and its drafters; generate, stream, chat.

    llm = LLM("smollm2", drafter="ngram")
    llm.generate(["Once upon a time"])[0].text

Use an LLM from one thread at a time. Its streams share the engine's steps: reading one advances all of them. While
programs run on it, a thread of theirs steps the engine, and the LLM itself takes no requests.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeVar, cast

from paceline.chat.template import ChatTemplate
from paceline.config import EngineConfig
from paceline.drafters.registry import completed, default_drafters
from paceline.engine.assemble import assemble
from paceline.errors import EngineDead, InvalidRequest
from paceline.models.weights import Format, Progress
from paceline.runner.loading.models import ReadyModel, choose_device
from paceline.types import (
    EMBEDDING,
    OFF,
    Finish,
    Logprob,
    Origin,
    Request,
    SamplingParams,
    SequenceStats,
    Speculation,
    TokenEvent,
)
from paceline.work_kinds import WorkKind, detect_kind

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
T = TypeVar("T")
MEASURING_SECONDS = 0.7  # time after loading in which passes are measured: what drafts may cost follows from it
KIND_TOKENS = 2048  # tokens at the beginning and at the end of a prompt that its kind of work is detected from
DRAFTED_KIND_TOKENS = 128  # the same where the kind only tells past drafts apart: it takes 0.1 ms of every request


@dataclass(slots=True)
class Sample:
    """One of the n answers to a prompt."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish: Finish | None = None
    stop: str | int | None = None
    stats: SequenceStats = field(default_factory=SequenceStats)

    def add(self, event: TokenEvent) -> None:
        self.text += event.text
        self.tokens += event.tokens
        self.origins += event.origins
        self.logprobs += event.logprobs
        if event.finish is not None:
            self.finish, self.stop = event.finish, event.stop
            self.stats = event.stats or self.stats


@dataclass(slots=True)
class Answer:
    """The answer to one prompt. `text`, `tokens` and `stats` are those of the first sample."""

    prompt_tokens: tuple[int, ...]
    samples: list[Sample]
    speculation: Speculation = field(default_factory=Speculation)  # as the engine got it: a threshold auto is resolved
    prompt_logprobs: tuple[Logprob | None, ...] | None = None

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def tokens(self) -> list[int]:
        return self.samples[0].tokens

    @property
    def stats(self) -> SequenceStats:
        return self.samples[0].stats


class LLM:
    """A loaded target with its drafters, and an engine that this thread steps."""

    def __init__(
        self,
        target: str | ReadyModel,
        *,
        drafter: str | Sequence[str] | None = None,
        format: Format = "auto",
        device: str = "auto",
        threads: int | None = None,
        cores: int | None = None,
        progress: Progress | None = None,
        recording: Progress | None = None,
        **options: Any,
    ) -> None:
        """Load a target and its drafters. A target that is ready brings its own format and device.

        `drafter`: see `paceline.drafters.registry`; an empty list means none. None means the head that comes with the
        target, if one does, and on a CPU a lookup. On a CPU a lookup is also loaded beside a head or a model, and of
        several drafters the portfolio is the default; on a GPU it is the first. `device`: cpu, cuda, or auto for a GPU
        if there is one. `threads`: of each process; None: as many as are the fastest. `cores`: that all processes may
        use together where there are no `threads`. `options` are fields of `EngineConfig`."""
        self._device = device = choose_device(device)
        if drafter is None:
            drafter = default_drafters(target, device, progress=progress)
        words = completed([drafter] if isinstance(drafter, str) else drafter, device)
        config = EngineConfig.of(device=device, **options)
        self.parts = assemble(
            target,
            drafters=words,
            format=format,
            device=device,
            threads=threads,
            cores=cores,
            config=config,
            progress=progress,
            recording=recording,
        )
        self.engine = self.parts.engine
        if device == "cpu":
            until = time.perf_counter() + MEASURING_SECONDS
            while time.perf_counter() < until and self.engine.improve():
                pass
        self.tokenizer = self.parts.tokenizer
        self._ids = map(str, itertools.count())
        self._inboxes: dict[str, list[TokenEvent]] = {}
        self.stepped_by: str | None = None  # who steps the engine on another thread; None: this LLM does

    @property
    def default_sampling(self) -> SamplingParams:
        """The sampling parameters that the model's authors advise; the usual ones if they advise none."""
        advice = dict(self.parts.generation.values)
        if advice.pop("do_sample", True) is False:
            return SamplingParams(temperature=0)
        known = {f.name for f in fields(SamplingParams)}
        return SamplingParams.of(**{name: value for name, value in advice.items() if name in known})

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculation: Speculation | Sequence[Speculation] | None = None,
        prediction: Prompt | Sequence[Prompt | None] | None = None,
    ) -> list[Answer]:
        """Answer all prompts in one batch. Parameters are one for all prompts, or one for each.

        `prediction` is a text that much of the answer may repeat: drafts come from it, and no answer changes."""
        each = cast(list[Prompt], [prompts] if _is_prompt(prompts) else list(prompts))
        many = zip(
            [self.encode(prompt) for prompt in each],
            _one_each("sampling", sampling or self.default_sampling, len(each)),
            _one_each("speculation", speculation or Speculation(), len(each)),
            self._predictions(prediction, len(each)),
            strict=True,
        )
        requests = [self.request(*one) for one in many]
        self._submit(requests)
        return [_collect(request, self._events(request)) for request in requests]

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        speculation: Speculation | None = None,
        prediction: Prompt | None = None,
    ) -> Iterator[TokenEvent]:
        """Yield events as they come. Closing the iterator early aborts the request."""
        tokens = self.encode(prompt)
        [predicted] = self._predictions(prediction, 1)
        request = self.request(tokens, sampling or self.default_sampling, speculation or Speculation(), predicted)
        self._submit([request])
        return self._events(request)

    def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        speculation: Speculation | None = None,
        prediction: Prompt | None = None,
    ) -> Answer:
        return self.generate([self.encode_chat(messages)], sampling, speculation=speculation, prediction=prediction)[0]

    def embed(self, texts: Prompt | Sequence[Prompt], *, pooling: str = "mean") -> list[tuple[float, ...]]:
        """Return a vector of length 1 for each text: the `mean` of the target's hidden states after the last norm over
        all tokens, or the state of the `last` token."""
        each = cast(list[Prompt], [texts] if _is_prompt(texts) else list(texts))
        requests = [
            Request(id=next(self._ids), prompt=self.encode(text), sampling=EMBEDDING, speculation=OFF, pooling=pooling)
            for text in each
        ]
        self._submit(requests)
        events = [event for request in requests for event in self._events(request)]
        return [event.embedding for event in events if event.embedding is not None]

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)

    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Encode a conversation by the model's own template, up to where the answer begins."""
        return tuple(self.chat_template.encode(messages))

    @cached_property
    def chat_template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer)

    def request(
        self,
        tokens: tuple[int, ...],
        sampling: SamplingParams,
        speculation: Speculation,
        prediction: tuple[int, ...] = (),
    ) -> Request:
        """Make a request with an id of its own. May be called from any thread."""
        speculation.rule.check_device(self._device)
        structured = sampling.grammar is not None
        made = Request(
            id=next(self._ids),
            prompt=tokens,
            sampling=sampling,
            speculation=self.resolved(speculation, [tokens], structured=structured),
            prediction=prediction,
        )
        return replace(made, kind=self.drafted_kind(tokens, made.speculation, structured=structured))

    def resolved(
        self, speculation: Speculation, prompts: Sequence[tuple[int, ...]], *, structured: bool
    ) -> Speculation:
        """Replace a threshold `auto` by the kind of work of these prompts. `structured`: the request has a grammar, a
        format or tools."""
        if speculation.threshold is not WorkKind.AUTO:
            return speculation
        return replace(speculation, threshold=self.kind_of(prompts, structured=structured))

    def kind_of(self, prompts: Sequence[tuple[int, ...]], *, structured: bool) -> WorkKind:
        """Detect the kind of work of these prompts."""
        return self._kind_of(prompts, KIND_TOKENS, structured=structured)

    def drafted_kind(self, prompt: tuple[int, ...], speculation: Speculation, *, structured: bool) -> WorkKind | None:
        """Detect the kind of work by which past drafts are told apart. None: nothing will be drafted.

        `speculation`: as the engine gets it; its threshold may say the kind already."""
        if not speculation.enabled or (speculation.drafter or self.engine.default_drafter) is None:
            return None
        return speculation.kind or self._kind_of([prompt], DRAFTED_KIND_TOKENS, structured=structured)

    def _kind_of(self, prompts: Sequence[tuple[int, ...]], tokens: int, *, structured: bool) -> WorkKind:
        """Detect the kind of work by so many tokens at the beginning and at the end of each prompt."""
        if structured:
            return WorkKind.JSON
        ends = [(*prompt[:tokens], *prompt[tokens:][-tokens:]) for prompt in prompts]
        return detect_kind("\n".join(map(self.tokenizer.decode, ends)), structured=structured)

    def _predictions(self, given: Prompt | Sequence[Prompt | None] | None, count: int) -> list[tuple[int, ...]]:
        """Encode the prediction for each prompt. Its text continues the prompt, so it gets no BOS token."""
        one_for_all = given is None or isinstance(given, str) or (len(given) > 0 and isinstance(given[0], int))
        each = cast(list[Prompt | None], [given] * count if one_for_all else _one_each("predictions", given, count))
        texts = [self.tokenizer.encode(one, add_bos=False) if isinstance(one, str) else one or () for one in each]
        return [tuple(tokens) for tokens in texts]

    def _submit(self, requests: Sequence[Request]) -> None:
        """Submit all requests or none: if one is refused, those before it are aborted."""
        if self.stepped_by is not None:
            raise InvalidRequest(f"{self.stepped_by} use this LLM: wait for their end, or ask by gen inside of one")
        for i, request in enumerate(requests):
            try:
                self.engine.submit(request)
            except Exception:
                for submitted in requests[:i]:
                    self._abort(submitted)
                raise
            self._inboxes[request.id] = []

    def _events(self, request: Request) -> Iterator[TokenEvent]:
        open_samples = request.sampling.n
        try:
            while open_samples:
                for event in self._read(request.id):
                    if event.finish is Finish.ERROR and self.engine.dead is None:
                        raise InvalidRequest(f"the answer could not be completed: {event.error}")
                    if event.finish is Finish.ERROR:
                        raise EngineDead(f"the engine stopped after an error ({event.error}); load the model anew")
                    open_samples -= event.finish is not None
                    yield event
        finally:
            if open_samples:
                self._abort(request)
            self._inboxes.pop(request.id, None)

    def _read(self, request_id: str) -> list[TokenEvent]:
        """Step the engine until there are events of a request, and return them."""
        while not self._inboxes[request_id]:
            for event in self.engine.step():
                self._inboxes.get(event.request_id, []).append(event)
        events, self._inboxes[request_id] = self._inboxes[request_id], []
        return events

    def _abort(self, request: Request) -> None:
        self.engine.abort(request.id)
        self._inboxes.pop(request.id, None)


def _is_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))


def _one_each(name: str, given: T | Sequence[T], count: int) -> list[T]:
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise InvalidRequest(f"{len(given)} {name} for {count} prompts; give one, or one for each prompt")
    return list(given)


def _collect(request: Request, events: Iterator[TokenEvent]) -> Answer:
    samples = [Sample() for _ in range(request.sampling.n)]
    answer = Answer(prompt_tokens=request.prompt, samples=samples, speculation=request.speculation)
    for event in events:
        answer.samples[event.sample].add(event)
        answer.prompt_logprobs = event.prompt_logprobs or answer.prompt_logprobs
    return answer
