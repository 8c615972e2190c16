"""A benchmark of the engine alone: batches of random prompts, plain and speculative, from submission to the last token.

The engines are those that `LLM` and the server run, made by the same `assemble`. Requests are greedy and have a fixed
length. The result is decode speed:

    submit │ prompts are read │ every request has its first token │ … │ the first has its last │ … │ all have
                                                                  └── full ────────────────┘       │
                                                                  └── whole ───────────────────────┘
    tok_s = tokens that came after every request had its first / those seconds

`tok_s` counts while the batch is full, at the batch size it is named for. Drafts are not equally lucky for all
requests, so at the end fewer and fewer run: `to_the_end_tok_s` counts that time too.

With random weights a drafter guesses nothing right. A *synthetic* acceptance then decides at random how many drafted
tokens count as right, so that a round does the work of a real one. The text means nothing, and every number made this
way is called synthetic.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from paceline.bench.engine_prompts import prompts_of
from paceline.bench.machine import copy_bandwidth, describe, release
from paceline.bench.mix import Mix
from paceline.config import EngineConfig
from paceline.drafters.block.drafter import BlockDrafter
from paceline.drafters.eagle.drafter import SHAPE, EagleDrafter
from paceline.drafters.prediction import PREDICTION
from paceline.drafters.registry import LOOKUPS, PORTFOLIO, find
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

Say = Callable[[str, int, int], None]
Mode = Literal["plain", "speculative", "off"]  # off: a drafter is loaded, but no request uses it
HEADS = {  # drafters of random weights: an EAGLE-3 head, a DSpark block
    "eagle-shape": EagleDrafter.name,
    "block-shape": BlockDrafter.name,
}
MAX_PROMPT_ROWS = 8192  # rows of one pass over prompts
SPARE_BYTES = 4 << 30  # GPU memory in bytes that must stay free beside two engines


@dataclass(frozen=True, slots=True)
class Setup:
    """Options of a measurement."""

    target: str  # a shape, a config.json, or a model
    drafter: str | None = None  # a shape, a config.json, a model, or any drafter of the registry
    portfolio: bool = False  # the lookup `ngram` is loaded beside it, and the portfolio of both drafts
    batches: tuple[int, ...] = (1,)
    draft: int = 4  # tokens of every draft; if the engine chooses them, of the longest
    governed: bool = False  # the engine chooses the lengths of drafts, as it does on real prompts
    acceptance: float | None = None  # synthetic, a probability per position; None: the target decides
    prompt_tokens: int = 128
    output_tokens: int = 320
    prompts: tuple[str, ...] = ()  # sets or files of real prompts, at most `prompt_tokens` long; (): random tokens
    format: Format = "auto"
    drafter_format: Format | None = None
    kv_format: str = "bf16"  # ignored on a CPU
    device: str = "cpu"
    threads: int | None = None
    tensor_parallel: int = 1
    same_bits: bool = False  # across degrees
    rounds: int = 3  # repetitions, of which the median counts
    off: bool = False  # measure mode `off` too
    mixes: tuple[Mix, ...] = ()  # further runs, in which some requests carry a sampling parameter
    seed: int = 0

    def __post_init__(self) -> None:
        if self.output_tokens < 2:
            raise InvalidRequest(f"output-tokens must be at least 2, not {self.output_tokens}: speed starts at the 2nd")
        if self.acceptance is not None and not 0 < self.acceptance <= 1:
            raise InvalidRequest(f"acceptance must be above 0 and at most 1, not {self.acceptance:g}")
        if self.prompts and self.acceptance is not None:
            raise InvalidRequest("--acceptance is for random prompts: on real ones the target decides")
        if self.drafter is None and (self.off or self.governed or self.portfolio or self.acceptance is not None):
            raise InvalidRequest(
                "--off, --governed, --portfolio and --acceptance speak of a drafter: name one with --drafter"
            )
        if self.portfolio and self.drafter in LOOKUPS:
            raise InvalidRequest(f"--portfolio adds a lookup to a head or a model, and {self.drafter} is a lookup")
        for mix in self.mixes:
            if mix.count > min(self.batches):
                raise InvalidRequest(f"mix {mix} needs {mix.count} requests at once, a batch has {min(self.batches)}")
            if mix.kind == "json" and (is_shape(self.target) or self.synthetic):
                raise InvalidRequest(
                    "mix json needs a model with a tokenizer, and no --acceptance: its text has a form"
                )

    @property
    def synthetic(self) -> bool:
        return self.acceptance is not None


@dataclass(frozen=True, slots=True)
class MemoryTraffic:
    """Bytes that an engine reads from memory."""

    target_weights: int  # per pass
    target_kv: int  # per token of context
    drafter_weights: int = 0
    drafter_kv: int = 0
    one_pass: bool = False  # a draft takes one pass, however long it is

    def per_step(self, *, sequences: float, context: float, drafted: float) -> float:
        """Compute the least bytes per step: all weights, and the KV cache of every sequence, once per pass. `drafted`:
        tokens of a sequence's draft."""
        tokens, passes = sequences * context, min(drafted, 1.0) if self.one_pass else drafted
        target = self.target_weights + tokens * self.target_kv
        return target + passes * (self.drafter_weights + tokens * self.drafter_kv)


@dataclass(frozen=True, slots=True)
class BatchRun:
    """One batch of requests, run once. Times and counts cover the time in which all of them decode."""

    mode: Mode
    batch: int
    round: int
    tokens: int
    seconds: float
    to_the_end_tok_s: float
    total_tok_s: float
    steps: int  # steps of the engine
    sequence_steps: int  # one per sequence and step in which it got tokens
    drafted: int
    accepted: int
    preemptions: int
    draft_seconds: float
    verify_seconds: float
    accept_seconds: float
    host_seconds: float  # concurrent with the parts above on a GPU
    wait_seconds: float  # the host waited for the device
    outputs: tuple[tuple[int, ...], ...]  # tokens of each request
    mix: str = ""  # requests with a sampling parameter; empty: none

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Measured:
    """All runs, and the facts needed to interpret them."""

    setup: Setup
    runs: tuple[BatchRun, ...]
    traffic: Mapping[Mode, MemoryTraffic]
    engines: Mapping[Mode, Mapping[str, Any]]  # facts about each engine
    bandwidth: float  # bytes per second
    interleaved: bool  # plain and speculative runs took turns; False: no memory for both engines at once
    machine: Mapping[str, Any]
    interrupted: bool = False  # the user stopped the measurement; the runs are those that were complete


def measure(setup: Setup, *, say: Say = lambda what, done, total: None) -> Measured:
    """Measure every batch size. `say` gets the name of each run, the number of complete runs and of all. Ctrl-C keeps
    the complete runs."""
    device = torch.device(setup.device)
    bandwidth = copy_bandwidth(device)
    release(device)
    free = _free(device)
    runs: list[BatchRun] = []
    engines: dict[Mode, Parts] = {"plain": build(setup, drafting=False)}
    facts: dict[Mode, dict[str, Any]] = {"plain": facts_of(engines["plain"])}
    traffic: dict[Mode, MemoryTraffic] = {"plain": traffic_of(engines["plain"])}
    interleaved = setup.drafter is not None and _room_for_another(device, free)
    if setup.drafter is not None:
        if not interleaved:
            for run in run_rounds(setup, engines, say):
                runs.append(run)  # noqa: PERF402 - Ctrl-C keeps what is measured
            engines.clear()
            gc.collect()
            release(device)
        drafting = build(setup, drafting=True)
        modes: tuple[Mode, ...] = ("speculative", "off") if setup.off else ("speculative",)
        for mode in modes:
            engines[mode], facts[mode], traffic[mode] = drafting, facts_of(drafting), traffic_of(drafting)
    interrupted = False
    try:
        for run in run_rounds(setup, engines, say):
            runs.append(run)  # noqa: PERF402 - Ctrl-C keeps what is measured
    except KeyboardInterrupt:
        if not runs:
            raise
        interrupted = True
    return Measured(setup, tuple(runs), traffic, facts, bandwidth, interleaved, describe(device), interrupted)


def build(setup: Setup, *, drafting: bool) -> Parts:
    config = config_of(setup, drafting=drafting)
    # Ranks read a model by its name, each its own part.
    model = setup.target if config.is_split else ready(setup.target, setup)
    parts = assemble(
        model,
        drafters=drafters_of(setup) if drafting else [],
        format=setup.format,
        device=setup.device,
        threads=setup.threads,
        config=config,
        seed=setup.seed,
    )
    need = max(setup.batches) * -(-(setup.prompt_tokens + setup.output_tokens + setup.draft + 1) // PAGE_SIZE)
    if parts.memory.num_pages < need:
        raise OutOfMemory(
            f"the KV cache holds {parts.memory.num_pages} pages, {need} are needed for {max(setup.batches)} sequences "
            "of this length at once: measure fewer or shorter ones"
        )
    return parts


def ready(name: str, setup: Setup) -> ReadyModel:
    if is_shape(name):
        return ready_shape(name, format=setup.format, device=setup.device, kv_format=setup.kv_format, seed=setup.seed)
    return read_model(name, format=setup.format, device=setup.device, kv_format=setup.kv_format)


def drafters_of(setup: Setup) -> list[str]:
    """List the drafters of the engine that speculates, in the registry's syntax."""
    return [drafter_words(setup), *(["ngram", PORTFOLIO] if setup.portfolio else [])]


def drafter_words(setup: Setup) -> str:
    """Write the drafter in the registry's syntax. A model or a shape gets options that keep all drafts equally long."""
    name = setup.drafter or ""
    options = f"max_draft={setup.draft},min_confidence=0"  # drafts never end early
    if name in HEADS:
        return f"{HEADS[name]}:{SHAPE},{options}"
    if find(name.partition(":")[0]) is not None:
        if setup.drafter_format is not None:
            raise InvalidRequest(f"drafter-format is for a model that drafts; write {name!r} with its own options")
        return name
    if setup.drafter_format is not None:
        options += f",format={setup.drafter_format}"
    return f"model:{'shape:' if is_shape(name) else ''}{name},{options}"


def config_of(setup: Setup, *, drafting: bool) -> EngineConfig:
    """Make options for runs that do the same work: no shared pages; drafts of one length, or as the engine chooses."""
    most = max(setup.batches)
    options: dict[str, Any] = {
        "max_sequences": most,
        "max_context": setup.prompt_tokens + setup.output_tokens,
        "max_step_tokens": max(256, most * (setup.draft + 1), min(MAX_PROMPT_ROWS, most * setup.prompt_tokens)),
        "kv_format": setup.kv_format,
        "prefix_cache": False,
        "max_draft": setup.draft,
        "max_draft_tokens": most * setup.draft,
        "tensor_parallel": setup.tensor_parallel,
        "same_bits_across_degrees": setup.same_bits,
        "measure_speedup": False,  # the modes of the bench are compared instead
    }
    if drafting:
        if not (setup.governed or setup.prompts):
            options |= {"fixed_draft": True, "measure_cost": False, "min_acceptance": 0.0}
        options["synthetic_acceptance"] = setup.acceptance or 0.0
    return EngineConfig.of(**options)


def facts_of(parts: Parts) -> dict[str, Any]:
    return {
        "target": parts.target.why,
        "drafters": {name: made.how for name, made in parts.drafters.items()},
        "bitwise": parts.bitwise,
        "kv_pages": parts.memory.num_pages,
        **asdict(traffic_of(parts)),
    }


def traffic_of(parts: Parts) -> MemoryTraffic:
    models = [made for made in parts.drafters.values() if made.pass_bytes]
    own = parts.target.page_bytes
    return MemoryTraffic(
        target_weights=parts.target.pass_bytes,
        target_kv=own // PAGE_SIZE,
        drafter_weights=sum(made.pass_bytes for made in models),
        drafter_kv=sum(made.page_bytes or own for made in models)
        // PAGE_SIZE,  # without pages of its own: the target's
        one_pass=bool(models) and all(made.one_pass for made in models),
    )


def run_rounds(setup: Setup, engines: Mapping[Mode, Parts], say: Say) -> Iterator[BatchRun]:
    """Run every batch size: once as a warm-up, then all modes and mixes in turns. Each run has a salt of its own: a
    drafter that remembers answers must not find those of the run before."""
    variants = [(mode, mix) for mode in engines for mix in (None, *setup.mixes)]
    done, total = 0, len(setup.batches) * (1 + setup.rounds) * len(variants)
    prompts = prompts_of(setup, next(iter(engines.values())))
    for batch in setup.batches:
        for round in range(-1, setup.rounds):
            for mode, mix in variants:
                what = f"{mode}, batch {batch}, {f'{mix}, ' if mix else ''}{_which(round)}"
                say(what, done, total)
                done += 1
                asked = requests(setup, batch, mode=mode, round=round, prompts=prompts)
                asked = [replace(each, cache_salt=what) for each in (mix.apply(asked) if mix else asked)]
                run = run_batch(engines[mode].engine, asked, mode=mode, round=round)
                logger.info("%s: %.1f tokens/s", what, run.tok_s)
                if round >= 0:
                    yield replace(run, mix=str(mix or ""))


def _which(round: int) -> str:
    return "warming up" if round < 0 else f"round {round + 1}"


def requests(setup: Setup, batch: int, *, mode: Mode, round: int, prompts: Sequence[tuple[int, ...]]) -> list[Request]:
    """Make the requests of a run. Every mode and round has the same prompts; seeds, which decide a synthetic
    acceptance, differ by round. With the drafter `prediction` each request predicts its own prompt."""
    predicts = setup.drafter == PREDICTION and mode == "speculative"
    speculation = Speculation() if mode == "speculative" else OFF
    sampling = SamplingParams(temperature=0, max_tokens=setup.output_tokens, ignore_eos=True)
    return [
        Request(
            id=str(i),
            prompt=prompts[i % len(prompts)],
            sampling=replace(sampling, seed=(1 + round) * batch + i),
            speculation=speculation,
            prediction=prompts[i % len(prompts)] if predicts else (),
        )
        for i in range(batch)
    ]


@dataclass(frozen=True, slots=True)
class Moment:
    """Progress of a run at one time."""

    clock: float
    tokens: int
    sequence_steps: int
    stats: EngineStats


def run_batch(engine: Engine, requests: Sequence[Request], *, mode: Mode, round: int) -> BatchRun:
    outputs: dict[str, list[int]] = {request.id: [] for request in requests}
    sequence_steps = 0
    gc.collect()  # now, rather than during the run
    began = time.perf_counter()
    for request in requests:
        engine.submit(request)
    while engine.has_work and not all(outputs.values()):
        _collect(engine.step(), outputs)
    tokens = sum(map(len, outputs.values()))
    all_run = all(len(outputs[request.id]) < (request.sampling.max_tokens or 0) for request in requests)
    start = full = end = Moment(time.perf_counter(), tokens, sequence_steps, replace(engine.stats))
    while engine.has_work:
        events = engine.step()
        if events:  # a device may run a last step without events
            new = _collect(events, outputs)
            tokens, sequence_steps = tokens + sum(new), sequence_steps + sum(map(bool, new))
            all_run = all_run and not any(event.finish for event in events)
            end = Moment(time.perf_counter(), tokens, sequence_steps, replace(engine.stats))
            full = end if all_run else full
    _check(requests, outputs)
    full = end if full is start else full  # too short: the batch was never full
    return BatchRun(
        mode=mode,
        batch=len(requests),
        round=round,
        tokens=full.tokens - start.tokens,
        seconds=full.clock - start.clock,
        to_the_end_tok_s=(end.tokens - start.tokens) / (end.clock - start.clock),
        total_tok_s=end.tokens / (end.clock - began),
        sequence_steps=full.sequence_steps - start.sequence_steps,
        outputs=tuple(tuple(tokens) for tokens in outputs.values()),
        **_since(start.stats, full.stats),
    )


def _collect(events: Sequence[TokenEvent], outputs: dict[str, list[int]]) -> list[int]:
    """Collect the tokens of a step; return how many each event has."""
    for event in events:
        if event.finish is Finish.ERROR:
            raise EngineDead(f"the engine stopped after an error ({event.error})")
        outputs[event.request_id] += event.tokens
    return [len(event.tokens) for event in events]


def _check(requests: Sequence[Request], outputs: Mapping[str, Sequence[int]]) -> None:
    """Raise unless every request got all its tokens."""
    for request in requests:
        wanted, got = request.sampling.max_tokens, len(outputs[request.id])
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
    """True if a second engine, somewhat larger than the first, fits beside it. `free`: bytes before the first one."""
    if device.type != "cuda":
        return True
    left = _free(device)
    return left > 1.25 * (free - left) + SPARE_BYTES
