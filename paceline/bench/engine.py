"""Measures the engine itself: batches of random prompts, plain and speculative, from submission to the last token.

The engines are those that `LLM` and the server run, put together by the same `assemble`. Everything is greedy and runs
to a fixed length. Decode speed is what counts:

    submit │ prompts are read │ every request has its first token │ … │ the first has its last │ … │ all have
                                                                  └── full ────────────────┘       │
                                                                  └── whole ───────────────────────┘
    tok_s = tokens that came after every request had its first / those seconds

While it is full the batch has the size it is named for: that is `tok_s`. Drafts are not equally lucky for all, so in
the end ever fewer requests run: the whole is `to_the_end_tok_s`.

With random weights a drafter guesses nothing right. A *synthetic* acceptance then decides at random how many drafted
tokens count as right, so that the work of a round is the work of a real one; the text means nothing, and no number that
was made this way appears without that word.
"""

from __future__ import annotations

import gc
import logging
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from paceline.bench.machine import copy_bandwidth, describe, release
from paceline.config import EngineConfig
from paceline.drafters.registry import REGISTRY
from paceline.engine.assemble import Parts, assemble
from paceline.engine.engine import Engine
from paceline.engine.stats import EngineStats
from paceline.errors import EngineDead, InvalidRequest, OutOfMemory
from paceline.kernels.base import PAGE_SIZE
from paceline.models.shapes import is_shape
from paceline.models.weights import Format
from paceline.runner.loading.models import ReadyModel, read_model, ready_shape
from paceline.types import OFF, Finish, Request, SamplingParams, Speculation, TokenEvent

logger = logging.getLogger(__name__)

Mode = Literal["plain", "speculative", "off"]  # off: a drafter is there, and no request wants it
PROMPT_ROWS = 8192  # rows of one pass over prompts at most
SPARE = 4 << 30  # bytes of a GPU that a second engine must leave


@dataclass(frozen=True, slots=True)
class Setup:
    """What to measure."""

    target: str  # a shape, a config.json, or a model
    drafter: str | None = None  # the same, or ngram
    batches: tuple[int, ...] = (1,)
    draft: int = 4  # tokens of every draft
    acceptance: float | None = None  # synthetic; None: drafts are compared with what the target says
    prompt_tokens: int = 128
    output_tokens: int = 320
    format: Format = "auto"
    drafter_format: Format | None = None
    kv_format: str = "bf16"  # on a GPU
    device: str = "cpu"
    threads: int | None = None
    rounds: int = 3
    off: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.output_tokens < 2:
            raise InvalidRequest(f"output-tokens must be at least 2, not {self.output_tokens}: speed starts at the 2nd")
        if self.acceptance is not None and not 0 < self.acceptance <= 1:
            raise InvalidRequest(f"acceptance must be above 0 and at most 1, not {self.acceptance:g}")
        if self.drafter is None and (self.off or self.acceptance is not None):
            raise InvalidRequest("--off and --acceptance speak of a drafter: name one with --drafter")

    @property
    def synthetic(self) -> bool:
        return self.acceptance is not None


@dataclass(frozen=True, slots=True)
class Bytes:
    """What an engine reads from memory."""

    target_weights: int  # a pass
    target_kv: int  # a token of context
    drafter_weights: int = 0
    drafter_kv: int = 0

    def a_step(self, *, sequences: float, context: float, draft_passes: float) -> float:
        """At least: all weights once a pass, and keys and values of every sequence once a pass."""
        tokens = sequences * context
        target = self.target_weights + tokens * self.target_kv
        return target + draft_passes * (self.drafter_weights + tokens * self.drafter_kv)


@dataclass(frozen=True, slots=True)
class Run:
    """One batch of requests. Times and counts are of the time in which all of them decode."""

    mode: Mode
    batch: int
    round: int
    tokens: int
    seconds: float
    to_the_end_tok_s: float
    total_tok_s: float
    steps: int  # of the engine
    sequence_steps: int  # one per sequence and step in which it got tokens
    drafted: int
    accepted: int
    preemptions: int
    draft_seconds: float
    verify_seconds: float
    accept_seconds: float
    host_seconds: float  # on a GPU at the same time as the parts above
    wait_seconds: float  # the host had nothing to do
    outputs: tuple[tuple[int, ...], ...]  # what each request was told

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Measured:
    """All runs, and what is needed to judge them."""

    setup: Setup
    runs: tuple[Run, ...]
    bytes: Mapping[Mode, Bytes]
    engines: Mapping[Mode, Mapping[str, Any]]  # what ran
    bandwidth: float  # bytes a second
    interleaved: bool  # plain and speculative runs took turns; else there was no memory for both engines at once
    machine: Mapping[str, Any]


def measure(setup: Setup) -> Measured:
    device = torch.device(setup.device)
    bandwidth = copy_bandwidth(device)
    release(device)
    free = _free(device)
    runs: list[Run] = []
    engines: dict[Mode, Parts] = {"plain": build(setup, drafting=False)}
    facts: dict[Mode, dict[str, Any]] = {"plain": facts_of(engines["plain"])}
    bytes: dict[Mode, Bytes] = {"plain": bytes_of(engines["plain"])}
    interleaved = setup.drafter is not None and _room_for_another(device, free)
    if setup.drafter is not None:
        if not interleaved:
            runs += play(setup, engines)
            engines.clear()
            gc.collect()
            release(device)
        drafting = build(setup, drafting=True)
        modes: tuple[Mode, ...] = ("speculative", "off") if setup.off else ("speculative",)
        for mode in modes:
            engines[mode], facts[mode], bytes[mode] = drafting, facts_of(drafting), bytes_of(drafting)
    runs += play(setup, engines)
    return Measured(setup, tuple(runs), bytes, facts, bandwidth, interleaved, describe(device))


def build(setup: Setup, *, drafting: bool) -> Parts:
    ready = _ready(setup.target, setup)
    words = [drafter_words(setup)] if drafting else []
    parts = assemble(ready, drafters=words, threads=setup.threads, config=config_of(setup, drafting=drafting))
    need = max(setup.batches) * -(-(setup.prompt_tokens + setup.output_tokens + setup.draft + 1) // PAGE_SIZE)
    if parts.memory.num_pages < need:
        raise OutOfMemory(
            f"the KV cache holds {parts.memory.num_pages} pages, {need} are needed for {max(setup.batches)} sequences "
            "of this length at once: measure fewer or shorter ones"
        )
    return parts


def _ready(name: str, setup: Setup) -> ReadyModel:
    if is_shape(name):
        return ready_shape(name, format=setup.format, device=setup.device, kv_format=setup.kv_format, seed=setup.seed)
    return read_model(name, format=setup.format, device=setup.device, kv_format=setup.kv_format)


def drafter_words(setup: Setup) -> str:
    """The drafter as the registry wants it named; words of its own go there as they are."""
    name = setup.drafter or ""
    if name.partition(":")[0] in REGISTRY:
        if setup.drafter_format is not None:
            raise InvalidRequest(f"drafter-format is for a model that drafts; write {name!r} with its own options")
        return name
    options = f"max_draft={setup.draft},min_confidence=0"  # no draft ends early
    if setup.drafter_format is not None:
        options += f",format={setup.drafter_format}"
    return f"model:{'shape:' if is_shape(name) else ''}{name},{options}"


def config_of(setup: Setup, *, drafting: bool) -> EngineConfig:
    """Drafts of one length for everybody, whether they pay or not, and no page shared: each run does the same work."""
    most = max(setup.batches)
    options: dict[str, Any] = {
        "max_sequences": most,
        "max_context": setup.prompt_tokens + setup.output_tokens,
        "max_step_tokens": max(256, most * (setup.draft + 1), min(PROMPT_ROWS, most * setup.prompt_tokens)),
        "kv_format": setup.kv_format,
        "prefix_cache": False,
        "max_draft": setup.draft,
    }
    if drafting:
        options |= {
            "fixed_draft": True,
            "measure_cost": False,
            "max_draft_tokens": most * setup.draft,
            "max_draft_batch": most,
            "min_acceptance": 0.0,
        }
        if setup.acceptance is not None:
            options["synthetic_acceptance"] = setup.acceptance
    return EngineConfig.of(**options)


def facts_of(parts: Parts) -> dict[str, Any]:
    return {
        "target": parts.target.why,
        "drafters": {name: made.how for name, made in parts.drafters.items()},
        "bitwise": parts.bitwise,
        "kv_pages": parts.memory.num_pages,
        **asdict(bytes_of(parts)),
    }


def bytes_of(parts: Parts) -> Bytes:
    models = [made for made in parts.drafters.values() if made.pass_bytes]
    own = parts.target.page_bytes
    return Bytes(
        target_weights=parts.target.pass_bytes,
        target_kv=own // PAGE_SIZE,
        drafter_weights=sum(made.pass_bytes for made in models),
        drafter_kv=sum(made.page_bytes or own for made in models) // PAGE_SIZE,  # without pages it reads the target's
    )


def play(setup: Setup, engines: Mapping[Mode, Parts]) -> Iterator[Run]:
    """For each batch size once to get warm, then all modes in turns."""
    for batch in setup.batches:
        for round in range(-1, setup.rounds):
            for mode, parts in engines.items():
                vocab_size = parts.target.model.config.vocab_size
                asked = requests(setup, batch, mode=mode, round=round, vocab_size=vocab_size)
                run = run_batch(parts.engine, asked, mode=mode, round=round)
                logger.info("%s, batch %d, %s: %.1f tokens/s", mode, batch, _which(round), run.tok_s)
                if round >= 0:
                    yield run


def _which(round: int) -> str:
    return "warming up" if round < 0 else f"round {round + 1}"


def requests(setup: Setup, batch: int, *, mode: Mode, round: int, vocab_size: int) -> list[Request]:
    """The same prompts for every mode and round; where acceptance is synthetic, other coins in every round."""
    rng = random.Random(setup.seed)
    speculation = Speculation() if mode == "speculative" else OFF
    sampling = SamplingParams(temperature=0, max_tokens=setup.output_tokens, ignore_eos=True)
    return [
        Request(
            id=str(i),
            prompt=tuple(rng.randrange(vocab_size) for _ in range(setup.prompt_tokens)),
            sampling=replace(sampling, seed=(1 + round) * batch + i),
            speculation=speculation,
        )
        for i in range(batch)
    ]


@dataclass(frozen=True, slots=True)
class Moment:
    """How far a run has come."""

    clock: float
    tokens: int
    sequence_steps: int
    stats: EngineStats


def run_batch(engine: Engine, asked: Sequence[Request], *, mode: Mode, round: int) -> Run:
    told: dict[str, list[int]] = {request.id: [] for request in asked}
    sequence_steps = 0
    gc.collect()  # now, rather than in the middle
    began = time.perf_counter()
    for request in asked:
        engine.submit(request)
    while engine.has_work and not all(told.values()):
        _hear(engine.step(), told)
    start = full = end = Moment(time.perf_counter(), _lengths(told), sequence_steps, replace(engine.stats))
    while engine.has_work:
        events = engine.step()
        if events:  # the last step on a device may be one that nobody waits for
            sequence_steps += _hear(events, told)
            end = Moment(time.perf_counter(), _lengths(told), sequence_steps, replace(engine.stats))
            full = end if _all_run(asked, told) else full
    _check(asked, told)
    full = end if full is start else full  # too short to be ever full
    return Run(
        mode=mode,
        batch=len(asked),
        round=round,
        tokens=full.tokens - start.tokens,
        seconds=full.clock - start.clock,
        to_the_end_tok_s=(end.tokens - start.tokens) / (end.clock - start.clock),
        total_tok_s=end.tokens / (end.clock - began),
        sequence_steps=full.sequence_steps - start.sequence_steps,
        outputs=tuple(tuple(tokens) for tokens in told.values()),
        **_since(start.stats, full.stats),
    )


def _all_run(asked: Sequence[Request], told: Mapping[str, Sequence[int]]) -> bool:
    return all(len(told[request.id]) < (request.sampling.max_tokens or 0) for request in asked)


def _hear(events: Sequence[TokenEvent], told: dict[str, list[int]]) -> int:
    """How many sequences said something."""
    for event in events:
        if event.finish is Finish.ERROR:
            raise EngineDead(f"the engine stopped after an error ({event.error})")
        told[event.request_id] += event.tokens
    return sum(bool(event.tokens) for event in events)


def _lengths(told: Mapping[str, Sequence[int]]) -> int:
    return sum(map(len, told.values()))


def _check(asked: Sequence[Request], told: Mapping[str, Sequence[int]]) -> None:
    for request in asked:
        wanted, got = request.sampling.max_tokens, len(told[request.id])
        if got != wanted:
            raise EngineDead(f"request {request.id} was told {got} tokens of {wanted}: the measurement is void")


def _since(before: EngineStats, after: EngineStats) -> dict[str, Any]:
    spent = {name: value - getattr(before, name) for name, value in asdict(after).items()}
    return {
        "steps": spent["steps"],
        "drafted": spent["drafted"],
        "accepted": spent["accepted"],
        "preemptions": spent["preemptions"],
        "draft_seconds": spent["time_draft"],
        "verify_seconds": spent["time_verify"],
        "accept_seconds": spent["time_accept"],
        "host_seconds": spent["time_plan"] + spent["time_emit"],
        "wait_seconds": spent["time_wait"],
    }


def _free(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def _room_for_another(device: torch.device, free: int) -> bool:
    """Whether a second engine, somewhat larger than the first, fits beside it. `free` was free before the first."""
    if device.type != "cuda":
        return True
    left = _free(device)
    return left > 1.25 * (free - left) + SPARE
