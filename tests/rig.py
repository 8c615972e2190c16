"""What the tests of the engine stand on: tiny models on every backend, engines of them, and runs to the end.

A run checks on the way what must always hold: the KV cache is consistent after every step, every sequence ends exactly
once and says nothing afterwards, and when all is over no page or lane is held.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from paceline.config import EngineConfig
from paceline.drafters.base import Drafter
from paceline.drafters.eagle import EagleDrafter
from paceline.drafters.guard import Guard
from paceline.drafters.medusa import MedusaDrafter
from paceline.drafters.model import ModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.prediction import PredictionDrafter
from paceline.drafters.registry import Setting
from paceline.engine.engine import Engine
from paceline.kernels.base import Forward
from paceline.kernels.quant import quantise
from paceline.kv.cache import KVCache
from paceline.models.config import ModelConfig
from paceline.models.heads import EagleHead
from paceline.models.naming import expected_shapes
from paceline.runner.compiled import CompiledForward
from paceline.runner.compiled_head import CompiledHead
from paceline.runner.eager import EagerForward
from paceline.runner.heads import EagerHead, HeadForward
from paceline.runner.lanes import Lanes
from paceline.runner.medusa import CompiledMedusa, EagerMedusa, MedusaForward
from paceline.runner.rounds import Lookup
from paceline.tokenizer import Tokenizer
from paceline.types import (
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
from tests.heads import random_eagle, random_medusa
from tests.toy import ToyForward
from tests.watched_rounds import WatchedRounds

BACKENDS = ("toy", "compiled", "eager")
ON_GPU = "PACELINE_GPU" in os.environ
VOCAB = 97
CONTEXT = 160

LIMITS = {
    "max_sequences": 8,
    "max_step_tokens": 32,
    "max_draft": 8,
    "drafter_timeout": 60.0,
    "measure_cost": False,  # counts must not depend on how busy the machine is
}

Key = tuple[str, int]  # request id, sample
Made = Callable[[Setting, str], Drafter]  # how a drafter is made, in a setting and on a backend


@dataclass(frozen=True)
class Model:
    """A tiny random model. With `noise`, the model of the same seed with that much of its weights replaced."""

    seed: int = 0
    noise: float = 0.0
    vocab_size: int = VOCAB
    sharpness: float = 3.0  # of the toy's distributions
    window: int = 0  # of the first layer's attention, where it is a real model

    def forward(self, backend: str, *, num_pages: int, taps: Sequence[int] = ()) -> Forward:
        if backend == "toy":
            return ToyForward(
                num_pages=num_pages,
                seed=self.seed,
                noise=self.noise,
                vocab_size=self.vocab_size,
                sharpness=self.sharpness,
                taps=taps,
            )
        if backend == "eager":
            return EagerForward(self.config, self.weights, num_pages=num_pages, taps=taps)
        if backend == "cuda":
            return cuda_forward(self, num_pages=num_pages, taps=taps)
        quantised = {name: quantise(w) if w.dim() == 2 else w for name, w in self.weights.items()}
        return CompiledForward(self.config, quantised, num_pages=num_pages, threads=1, taps=taps)

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(
            architecture="llama",
            vocab_size=self.vocab_size,
            hidden_size=64,
            intermediate_size=96,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            max_context=1024,
            norm_eps=1e-5,
            rope_theta=1e4,
            windows=(self.window, 0) if self.window else (),
        )

    @functools.cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        own, other = (_random_weights(self.config, seed) for seed in (self.seed, self.seed + 1000))
        return {name: weight + self.noise * other[name] for name, weight in own.items()}


def cuda_forward(model: Model, *, num_pages: int, kv: Any = None, taps: Sequence[int] = ()) -> Forward:
    """The kernels for GPUs: on one, or by Triton's interpreter."""
    from paceline.runner.cuda import CudaDecoder, CudaForward, new_kv

    device, dtype = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
    decoder = CudaDecoder(
        model.config, dict(model.weights), max_context=CONTEXT + 32, dtype=dtype, device=device, pdl=ON_GPU
    )
    kv = kv or new_kv(model.config, num_pages=num_pages, dtype=dtype, device=device)
    return CudaForward(decoder, kv, taps=taps)


def _random_weights(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in expected_shapes(config).items()}
    scales = {"embed": 0.3, "head": 0.3}  # larger than the layers: greedy text falls into loops now and then
    return {
        name: 1 + 0.1 * weight if weight.dim() == 1 else scales.get(name, 0.13) * weight
        for name, weight in drawn.items()
    }


TARGET = Model()


@functools.cache
def tiny_tokenizer() -> Tokenizer:
    """Letters, pairs of letters, two halves of an é, and one control token (id 0): a stop string may begin anywhere."""
    letters = [chr(ord("a") + i) for i in range(26)]
    pairs = [(a, b) for a in "aeiou" for b in letters][: VOCAB - 30]
    tokens = ["<eos>", *letters, "Ġ", "Ã", "©", *(a + b for a, b in pairs)]
    names = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3] + [1] * (VOCAB - 1),
        "merges": [f"{a} {b}" for a, b in pairs],
        "eos_token_id": 0,
    }
    return Tokenizer.from_gguf({f"tokenizer.ggml.{name}": value for name, value in names.items()})


def model_drafter(model: Model, *, min_confidence: float = 0.0) -> Made:
    """Without a `min_confidence`: random models believe in nothing."""

    def make(setting: Setting, backend: str) -> Drafter:
        return ModelDrafter(
            model.forward(backend, num_pages=setting.pool.num_pages),
            name="model",
            lanes=setting.lanes,
            pool=setting.pool,
            vocab_size=setting.vocab_size,
            chunk=setting.max_step_tokens,
            min_confidence=min_confidence,
        )

    return make


@dataclass(frozen=True)
class MedusaMade:
    """A drafter with random Medusa heads."""

    min_confidence: float = 0.0
    taps: tuple[int] = (2,)

    def __call__(self, setting: Setting, backend: str) -> Drafter:
        heads = random_medusa(TARGET.config)
        made: MedusaForward = EagerMedusa(heads)
        if backend == "compiled":
            made = CompiledMedusa([head.in_format("int8") for head in heads], threads=1)
        return MedusaDrafter(made, tap=self.taps[0], name="medusa", min_confidence=self.min_confidence)


@dataclass(frozen=True)
class EagleMade:
    """A drafter with a random head, which on the compiled backend is compiled."""

    draft_vocab: int = VOCAB
    min_confidence: float = 0.0
    taps: tuple[int, int, int] = (0, 1, 1)
    vocab_size: int = VOCAB

    def __call__(self, setting: Setting, backend: str) -> Drafter:
        config = replace(TARGET.config, vocab_size=self.vocab_size)
        head = random_eagle(config, taps=self.taps, draft_vocab=self.draft_vocab)
        return EagleDrafter(
            self.forward(head, setting, backend),
            taps=self.taps,
            width=3 * TARGET.config.hidden_size,
            name="eagle",
            lanes=setting.lanes,
            pool=setting.pool,
            vocab_size=setting.vocab_size,
            pick=setting.target.pick,
            min_confidence=self.min_confidence,
        )

    def forward(self, head: EagleHead, setting: Setting, backend: str) -> HeadForward:
        pages = setting.pool.num_pages
        if backend == "compiled":
            assert isinstance(setting.target, CompiledForward)
            return CompiledHead(
                head.in_format("int8"), setting.target, num_pages=pages, max_context=setting.max_context
            )
        return EagerHead(
            head, setting.target, num_pages=pages, device="cuda" if backend == "cuda" and ON_GPU else "cpu"
        )


def always(drafter: Drafter) -> Made:
    return lambda setting, backend: drafter


NOISY = Model(noise=0.05)
BAD = Model(seed=5)

# At least one drafter of every kind in drafters.registry.REGISTRY: that is what puts a kind under the laws.
RIGS: Mapping[str, Mapping[str, Made]] = {
    "ngram": {
        "ngram": lambda setting, backend: NgramDrafter(),
        "ngram-1": lambda setting, backend: NgramDrafter(min_ngram=1, max_ngram=2),
    },
    "model": {
        "good": model_drafter(TARGET),
        "noisy": model_drafter(NOISY),
        "bad": model_drafter(BAD),
        "hesitant": model_drafter(NOISY, min_confidence=0.2),
        "narrow": model_drafter(Model(seed=5, vocab_size=80)),
        "wide": model_drafter(Model(seed=5, vocab_size=128)),
    },
    "eagle": {
        "eagle": EagleMade(),
        "eagle-narrow": EagleMade(draft_vocab=40),
        "eagle-hesitant": EagleMade(min_confidence=0.05),
    },
    "prediction": {"prediction": lambda setting, backend: PredictionDrafter()},
    "medusa": {"medusa": MedusaMade(), "medusa-hesitant": MedusaMade(min_confidence=0.02)},
    "self": {},  # a device's alone: see FLOWN
}


@dataclass(frozen=True)
class Itself:
    """The target with some noise, on the target's own KV memory. Not every backend can share it."""

    noise: float = 0.05

    def forward(self, target: Forward) -> Forward:
        if not isinstance(target, (ToyForward, EagerForward)):
            return cuda_forward(replace(TARGET, noise=self.noise), num_pages=1, kv=target.kv)
        copy = replace(TARGET, noise=self.noise).forward(
            "toy" if isinstance(target, ToyForward) else "eager", num_pages=1
        )
        copy.kv = target.kv
        if isinstance(copy, ToyForward) and isinstance(target, ToyForward):
            copy._kv = target._kv
        elif isinstance(copy, EagerForward) and isinstance(target, EagerForward):
            copy.backend = target.backend
        else:
            raise AssertionError(f"{type(target).__name__} does not share its KV memory")
        return copy


Flown = Model | Lookup | Itself

# The same drafters, run by a device; and those that only a device can run, where the backend can.
SELF = {"self": Itself()}
FLOWN: Mapping[str, Model | Lookup] = {
    "ngram": Lookup(),
    "ngram-1": Lookup(min_ngram=1, max_ngram=2),
    "good": TARGET,
    "noisy": NOISY,
    "bad": BAD,
    "narrow": Model(seed=5, vocab_size=80),
    "wide": Model(seed=5, vocab_size=128),
}


@dataclass
class Rig:
    """An engine and what it was made of."""

    engine: Engine
    forward: Forward
    lanes: Lanes
    cache: KVCache
    rounds: Any = None


def _device_drafter(by: Flown, backend: str, target: Forward) -> Forward | Lookup:
    if isinstance(by, Lookup):
        return by
    return by.forward(target) if isinstance(by, Itself) else by.forward(backend, num_pages=target.kv.num_pages)


def _rounds(forward: Forward, backend: str, *, config: EngineConfig, **options: Any) -> Any:
    if backend == "cuda":
        from paceline.runner.cuda_rounds import CudaRounds

        return CudaRounds(forward, max_draft=config.max_draft, graphs=ON_GPU, **options)  # type: ignore[arg-type]
    return WatchedRounds(forward, max_draft=config.max_draft, **options)


def build(
    backend: str = "toy",
    drafters: Mapping[str, Made] | None = None,
    *,
    forward: Forward | None = None,
    num_pages: int = 160,
    max_context: int = CONTEXT,
    eos_ids: Sequence[int] = (),
    tokenizer: Tokenizer | None = None,
    clock: Callable[[], float] | None = None,
    flown: Mapping[str, Flown] | None = None,
    **options: Any,
) -> Rig:
    """An engine by hand, of small limits so that they are met. The first drafter is the default. With `flown`, steps
    run on a device that can do these drafters, and those of `drafters` on the host."""
    config = EngineConfig.of(**{**LIMITS, **options})
    if forward is None:
        taps = sorted({tap for made in (drafters or {}).values() for tap in getattr(made, "taps", ())})
        forward = TARGET.forward(backend, num_pages=num_pages, taps=taps)
    lanes = Lanes(count=config.max_sequences, max_context=max_context, max_draft=config.max_draft)
    cache = KVCache(forward.kv, share_prefixes=config.prefix_cache)
    setting = Setting(
        lanes=lanes,
        pool=cache.pool,
        vocab_size=forward.vocab_size,
        max_context=max_context,
        max_step_tokens=config.max_step_tokens,
        threads=1,
        target=forward,
    )
    guards = {
        name: Guard(make(setting, backend), vocab_size=forward.vocab_size, timeout=config.drafter_timeout)
        for name, make in (drafters or {}).items()
    }
    rounds: Any = None
    if flown is not None:
        by = {name: _device_drafter(by, backend, forward) for name, by in flown.items()}
        rounds = _rounds(
            forward, backend, lanes=config.max_sequences, max_context=max_context, drafters=by, config=config
        )
        rounds.cache = cache
    engine = Engine(
        forward,
        config=config,
        lanes=lanes,
        cache=cache,
        max_context=max_context,
        eos_ids=eos_ids,
        drafters=guards,
        default_drafter=next(iter([*(flown or ()), *guards]), None),
        tokenizer=tokenizer,
        rounds=rounds,
        **({} if clock is None else {"clock": clock}),
    )
    return Rig(engine=engine, forward=forward, lanes=lanes, cache=cache, rounds=rounds)


@dataclass
class Told:
    """All that an engine said of one sequence."""

    tokens: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    text: str = ""
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: tuple[Logprob | None, ...] | None = None
    finish: Finish | None = None
    stop: str | int | None = None
    error: str | None = None
    stats: SequenceStats = field(default_factory=SequenceStats)

    def add(self, event: TokenEvent) -> None:
        assert self.finish is None, f"an event after the end: {event}"
        self.tokens += event.tokens
        self.origins += event.origins
        self.text += event.text
        self.logprobs += event.logprobs
        assert len(event.origins) == len(event.tokens)
        assert (event.stats is None) == (event.finish is None), "statistics belong to the last event, and only there"
        if event.finish is not None:
            assert event.stats is not None
            self.finish, self.stop, self.error, self.stats = event.finish, event.stop, event.error, event.stats
            self.prompt_logprobs = event.prompt_logprobs


class Run:
    """Requests on their way through an engine."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.told: dict[Key, Told] = {}
        self.steps = 0

    def submit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.rig.engine.submit(request)
            self.told |= {(request.id, sample): Told() for sample in range(request.sampling.n)}

    def step(self) -> list[TokenEvent]:
        events = self.rig.engine.step()
        for event in events:
            self.told[event.request_id, event.sample].add(event)
        self.rig.engine.check()
        self.check_lanes()
        self.steps += 1
        assert self.steps < 5000, "the engine does not come to an end"
        return events

    def finish(self) -> dict[Key, Told]:
        while self.rig.engine.has_work:
            self.step()
        self.check_over()
        return self.told

    def check_lanes(self) -> None:
        """What the device sees of a running sequence is what the engine knows of it."""
        for sequence in self.rig.engine._scheduler.running:
            length = int(self.rig.lanes.lengths_np[sequence.lane])
            assert self.rig.lanes.tokens_np[sequence.lane, :length].tolist() == sequence.tokens
            assert sequence.span is not None
            pages = self.rig.lanes.pages_np[sequence.lane].tolist()
            assert [page for page in pages if page >= 0] == sequence.span.pages

    def check_over(self) -> None:
        unfinished = [key for key, told in self.told.items() if told.finish is None]
        assert not unfinished, f"never ended: {unfinished}"
        assert self.rig.lanes.free == len(self.rig.lanes.lengths), "a lane was lost"
        assert self.rig.cache.pool.held == 0, "a page was lost"


def run(rig: Rig, requests: Sequence[Request], *, every: int = 0) -> dict[Key, Told]:
    """All requests to the end; with `every`, one more arrives after that many steps each time."""
    going = Run(rig)
    if not every:
        going.submit(requests)
    for request in requests if every else ():
        going.submit([request])
        for _ in range(every):
            going.step()
    told = going.finish()
    assert rig.engine.dead is None, rig.engine.dead
    return told


def tokens_of(told: Mapping[Key, Told]) -> dict[Key, list[int]]:
    return {key: each.tokens for key, each in told.items()}


def plain(requests: Iterable[Request]) -> list[Request]:
    """The same requests without speculation."""
    return [replace(request, speculation=OFF) for request in requests]


def prompt(length: int, *, seed: int, repeat: bool = False) -> tuple[int, ...]:
    """Random tokens; with `repeat` a random phrase over and over, which lookup drafters like."""
    drawn = np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
    return tuple(itertools.islice(itertools.cycle(drawn[: max(2, length // 4)]), length) if repeat else drawn)


GREEDY = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.4),
    SamplingParams(temperature=0, logit_bias={7: 2.0, 11: -3.0}, min_tokens=9, stop_ids=(3, 4, 5, 6)),
    SamplingParams(temperature=0, n=2),
)
SAMPLED = (
    SamplingParams(temperature=1, seed=5),
    SamplingParams(temperature=0.7, top_k=5, seed=2**64 - 1),
    SamplingParams(temperature=0.9, top_p=0.6, seed=3, n=3),
    SamplingParams(temperature=1.3, min_p=0.05, seed=4, repetition_penalty=1.3, presence_penalty=0.5),
    SamplingParams(
        temperature=0.8, top_k=20, top_p=0.9, seed=6, frequency_penalty=0.7, allowed_tokens=tuple(range(50))
    ),
)
# What a device can do by itself.
FLYING: Mapping[str, Sequence[SamplingParams]] = {
    "greedy": (
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, n=2),
        SamplingParams(temperature=0, stop_ids=tuple(range(3, 10))),
    ),
    "sampled": (
        SamplingParams(temperature=1, seed=5),
        SamplingParams(temperature=0.7, top_k=5, seed=2**64 - 1),
        SamplingParams(temperature=0.9, top_p=0.6, seed=3, n=3),
        SamplingParams(temperature=1.3, min_p=0.05, seed=4, stop_ids=tuple(range(3, 10))),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=6),
    ),
}
LENGTHS = (1, 50, 17, 9, 33, 16, 70)  # of prompts: shorter and longer than a step's rows, at and off a page's end


def mixed_requests(
    params: Sequence[SamplingParams], speculations: Sequence[Speculation], *, count: int, max_tokens: int = 24
) -> list[Request]:
    """Requests that differ in length, parameters and speculation, all in one batch."""
    return [
        Request(
            id=str(i),
            prompt=prompt(LENGTHS[i % len(LENGTHS)], seed=i, repeat=i % 3 == 1),
            sampling=replace(params[i % len(params)], max_tokens=max_tokens - i % 5),
            speculation=speculations[i % len(speculations)],
        )
        for i in range(count)
    ]
