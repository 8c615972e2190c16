"""A benchmark of prompts: how fast they are read, and how long decoding sequences wait for one.

The engine has the defaults of its device. Prompts are random, and every request of a work has its first token when the
clock stops:

    speed     submit `count` prompts of `length` tokens │ … │ all have their first token      tok_s = count · length / s
    share     of the arithmetic limit, where C kernels run: seconds at best / s (paceline.bench.arithmetic)
    beside    sequences decode │ submit a long prompt │ … │ it has its first token
                               └── gaps: seconds between two outputs of the same decoding sequence ──┘
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from paceline.bench.arithmetic import prompt_arithmetic
from paceline.bench.engine import Say, Setup, ready
from paceline.bench.machine import describe
from paceline.config import EngineConfig
from paceline.engine.assemble import Parts, assemble
from paceline.engine.engine import Engine
from paceline.errors import EngineDead, InvalidRequest, OutOfMemory
from paceline.kernels.base import PAGE_SIZE
from paceline.kernels.cpu.limits import Limits, measure_limits
from paceline.models.config import ModelConfig
from paceline.types import OFF, Finish, Request, SamplingParams

SETTLING_STEPS = 16  # steps of decoding before the long prompt comes
OUTPUT_TOKENS = 4096  # of the decoding sequences: they must outlast the prompt
DEFINITION = (
    "tok_s: tokens of all prompts / seconds from submission until all have their first token; "
    "first_token_s: these seconds; limit_share: seconds at the arithmetic limit / these seconds; "
    "gaps: seconds between two outputs of a decoding sequence, while the long prompt has no token yet"
)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts that are submitted at once."""

    count: int
    length: int

    @classmethod
    def parse(cls, text: str) -> Prompts:
        """Read "8192", or "16x2048" for sixteen prompts."""
        count, times, length = text.rpartition("x")
        try:
            found = cls(count=int(count) if times else 1, length=int(length))
        except ValueError:
            found = cls(0, 0)
        if found.count < 1 or found.length < 1:
            raise InvalidRequest(f"prompts are given as 8192 or as 16x2048, not as {text!r}")
        return found

    def __str__(self) -> str:
        return f"{self.count}x{self.length}"


@dataclass(frozen=True, slots=True)
class Beside:
    """One long prompt, read beside decoding sequences."""

    seconds: float  # from submission to its first token
    gaps: tuple[float, ...]  # seconds, of all decoding sequences

    def percentile(self, share: float) -> float:
        ordered = sorted(self.gaps)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measure(
    setup: Setup,
    speeds: tuple[Prompts, ...],
    beside: int | None,
    *,
    say: Say = lambda what, done, total: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Measure the reading of `speeds`, and of a prompt of `beside` tokens while the other sequences of the largest
    batch decode. Each is run once before, as a warm-up."""
    if setup.drafter is not None:
        raise InvalidRequest("the reading of prompts is measured without a drafter: leave --drafter out")
    if beside is not None and max(setup.batches) < 2:
        raise InvalidRequest("--beside needs sequences that decode: give a --batch of at least 2")
    parts = _build(setup, speeds, beside)
    limits = measure_limits(setup.threads) if parts.target.compiled else None
    vocab, rounds = parts.target.model.config.vocab_size, range(-1, setup.rounds)
    total, done = (len(speeds) + (beside is not None)) * len(rounds), 0
    read: dict[Prompts, list[float]] = {prompts: [] for prompts in speeds}
    waits: list[Beside] = []
    for round in rounds:
        draw = random.Random(f"{setup.seed} {round}")
        for prompts in speeds:
            say(f"{prompts} prompts", done, total)
            seconds = read_once(parts.engine, _requests(draw, prompts, vocab, tokens=1), clock=clock)
            read[prompts] += [seconds] if round >= 0 else []
            done += 1
        if beside is not None:
            say(f"a prompt of {beside} beside others", done, total)
            others = _requests(draw, Prompts(max(setup.batches) - 1, setup.prompt_tokens), vocab, tokens=OUTPUT_TOKENS)
            found = read_beside(
                parts.engine, _requests(draw, Prompts(1, beside), vocab, tokens=1)[0], others, clock=clock
            )
            waits += [found] if round >= 0 else []
            done += 1
    return {
        "benchmark": "reading",
        "definition": DEFINITION,
        "setup": asdict(setup),
        "machine": describe(torch.device(setup.device)),
        "limits": asdict(limits) if limits else None,
        "prompts": [_speed(prompts, runs, limits, parts.target.model.config) for prompts, runs in read.items()],
        "beside": _beside(beside, max(setup.batches) - 1, waits) if beside is not None else None,
    }


def text(found: Mapping[str, Any]) -> str:
    lines = [_limits_text(found["limits"])] if found["limits"] else []
    lines += [_speed_text(line) for line in found["prompts"]]
    if beside := found["beside"]:
        gaps = ", ".join(f"{name} {1e3 * beside['gaps'][name]:.1f}" for name in ("median", "p99", "max"))
        lines.append(
            f"{beside['sequences']} decoding sequences beside a prompt of {beside['length']}: "
            f"ms between tokens {gaps}; the prompt {beside['tok_s']:,.0f} tokens/s"
        )
    return "\n".join(lines)


def _limits_text(limits: Mapping[str, Any]) -> str:
    return (
        f"at best, {limits['variant']}, {limits['threads']} threads: {1e-9 * limits['bytes']:,.0f} G multiply-adds/s "
        f"of 8-bit products, {1e-9 * limits['floats']:,.0f} of attention"
    )


def _speed_text(line: Mapping[str, Any]) -> str:
    said = f"{line['count']} × {line['length']}: {line['tok_s']:,.0f} tokens/s of reading"
    said += f", first token after {line['first_token_s']:.2f} s"
    return said + (f", {line['limit_share']:.0%} of the arithmetic limit" if line["limit_share"] else "")


def read_once(engine: Engine, requests: list[Request], *, clock: Callable[[], float]) -> float:
    """Return the seconds until all requests have their first token, which is their last."""
    began = clock()
    for request in requests:
        engine.submit(request)
    open_ = {request.id for request in requests}
    while open_:
        open_ -= _heard(engine)
    took = clock() - began
    _finish(engine)
    return took


def read_beside(engine: Engine, prompt: Request, others: list[Request], *, clock: Callable[[], float]) -> Beside:
    """Let the others decode, read the prompt beside them, and note when each of them is heard."""
    for request in others:
        engine.submit(request)
    silent = {request.id for request in others}
    while silent:
        silent -= _heard(engine)
    for _ in range(SETTLING_STEPS):
        _heard(engine)
    last, gaps, began, heard = dict.fromkeys((request.id for request in others), clock()), [], clock(), set[str]()
    engine.submit(prompt)
    while prompt.id not in heard:
        heard, now = _heard(engine), clock()
        gaps += [now - last[name] for name in heard if name in last]
        last |= dict.fromkeys(heard & last.keys(), now)
    for request in others:
        engine.abort(request.id)
    _finish(engine)
    return Beside(seconds=now - began, gaps=tuple(gaps))


def _heard(engine: Engine) -> set[str]:
    """Run a step; return the requests that got tokens."""
    events = engine.step()
    for event in events:
        if event.finish is Finish.ERROR:
            raise EngineDead(f"the engine stopped after an error ({event.error})")
    return {event.request_id for event in events if event.tokens}


def _finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def _requests(draw: random.Random, prompts: Prompts, vocab: int, *, tokens: int) -> list[Request]:
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return [
        Request(
            id=f"{prompts} {i}",
            prompt=tuple(draw.randrange(vocab) for _ in range(prompts.length)),
            sampling=sampling,
            speculation=OFF,
        )
        for i in range(prompts.count)
    ]


def _build(setup: Setup, speeds: tuple[Prompts, ...], beside: int | None) -> Parts:
    """Assemble a plain engine with the defaults of the device, and room for all that is measured."""
    wanted = [prompts.length + 1 for prompts in speeds]
    wanted += [beside + 1, setup.prompt_tokens + OUTPUT_TOKENS] if beside is not None else []
    most = max([max(setup.batches), *(prompts.count for prompts in speeds)])
    config = EngineConfig.of(
        device=setup.device,
        max_sequences=most,
        max_context=max(wanted),
        kv_format=setup.kv_format,
        prefix_cache=False,
    )
    parts = assemble(ready(setup.target, setup), threads=setup.threads, config=config)
    pages = max([prompts.count * -(-(prompts.length + 2) // PAGE_SIZE) for prompts in speeds], default=0)
    if parts.memory.num_pages < pages:
        raise OutOfMemory(
            f"the KV cache holds {parts.memory.num_pages} pages, {pages} are needed: read shorter prompts"
        )
    return parts


def _speed(prompts: Prompts, runs: list[float], limits: Limits | None, config: ModelConfig) -> dict[str, Any]:
    seconds, tokens = statistics.median(runs), prompts.count * prompts.length
    best = prompts.count * prompt_arithmetic(config, prompts.length).seconds(limits) if limits else None
    return {
        "count": prompts.count,
        "length": prompts.length,
        "tok_s": tokens / seconds,
        "tok_s_runs": [tokens / run for run in runs],
        "first_token_s": seconds,
        "limit_share": best / seconds if best is not None else None,
    }


def _beside(length: int, sequences: int, waits: list[Beside]) -> dict[str, Any]:
    together = Beside(0.0, tuple(gap for wait in waits for gap in wait.gaps))
    seconds = [wait.seconds for wait in waits]
    return {
        "length": length,
        "sequences": sequences,
        "seconds": seconds,
        "tok_s": length / statistics.median(seconds),
        "gaps": {
            "count": len(together.gaps),
            "median": together.percentile(0.5),
            "p99": together.percentile(0.99),
            "max": together.percentile(1.0),
        },
    }
