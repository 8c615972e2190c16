"""What a step costs: by rows, by batch size, and how much of it is the host.

- rows: one sequence verifying drafts of 0 … 15 tokens, the forward pass alone;
- batch: plain decoding of 1 … 16 sequences, tokens/s and the share of a step outside of the forward pass.

All configurations take turns, `--rounds` times; medians.

    python -m bench.steps smollm2
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from paceline import LLM, OFF, SamplingParams
from paceline.bench.machine import describe
from paceline.draft import Draft
from paceline.kernels.base import Batch, Output
from paceline.runner.batch import Share, build_batch
from paceline.types import Request

PROMPT = "The history of the bicycle begins long before anybody rode one to work. " * 8


class Timed:
    """A Forward that remembers how long its passes took."""

    def __init__(self, forward: Any) -> None:
        self._forward = forward
        self.seconds: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forward, name)

    def __call__(self, batch: Batch) -> Output:
        began = time.perf_counter()
        output: Output = self._forward(batch)
        self.seconds.append(time.perf_counter() - began)
        return output


def median_ms(run: Callable[[], Output], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1e3


def rows_ms(llm: LLM, rows: list[int], rounds: int) -> dict[int, float]:
    """Milliseconds of one pass over n rows of one sequence, behind about 130 tokens of context."""
    engine = llm.engine
    tokens = llm.encode(PROMPT)
    engine.submit(Request(id="rows", prompt=tokens, sampling=SamplingParams(temperature=0, ignore_eos=True)))
    while engine.stats.output_tokens == 0:
        engine.step()
    sequence = engine._scheduler.running[0]
    start, span = len(sequence.tokens) - 1, sequence.span
    assert span is not None
    engine._cache.reserve(span, start + max(rows) + 1)
    engine._lanes.pages_np[sequence.lane, : len(span.pages)] = span.pages
    batches = {
        n: build_batch(engine._lanes, [Share(sequence.lane, start, 1, Draft(tokens=(5,) * (n - 1)))]) for n in rows
    }
    times: dict[int, list[float]] = {n: [] for n in rows}
    for _ in range(rounds):
        for n, batch in batches.items():
            times[n].append(median_ms(partial(engine._forward, batch), 15))
    engine.abort("rows")
    engine.step()
    return {n: round(statistics.median(values), 3) for n, values in times.items()}


def batch_speeds(llm: LLM, sizes: list[int], tokens: int, rounds: int) -> dict[int, dict[str, float]]:
    """Plain decoding of n sequences: tokens/s, and the host's share of a step."""
    forward = llm.engine._forward = Timed(llm.engine._forward)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    speeds: dict[int, list[float]] = {n: [] for n in sizes}
    shares: dict[int, list[float]] = {n: [] for n in sizes}
    for _ in range(rounds):
        for n in sizes:
            prompts = [llm.encode(f"{i}. {PROMPT}") for i in range(n)]
            for i, prompt in enumerate(prompts):
                llm.engine.submit(Request(id=f"{i}", prompt=prompt, sampling=params, speculation=OFF))
            while (
                any(sequence.todo != 1 for sequence in llm.engine._scheduler.running) or llm.engine._scheduler.waiting
            ):
                llm.engine.step()
            speed, share = _decode(llm, forward, tokens // 2)
            speeds[n].append(speed)
            shares[n].append(share)
            while llm.engine.has_work:
                llm.engine.step()
    return {
        n: {"tok_s": round(statistics.median(speeds[n]), 1), "host_share": round(statistics.median(shares[n]), 4)}
        for n in sizes
    }


def _decode(llm: LLM, forward: Timed, steps: int) -> tuple[float, float]:
    """Tokens/s over some steps of pure decoding, and the part of their time spent outside of the forward pass."""
    before = llm.engine.stats.output_tokens
    walls, hosts = [], []
    for _ in range(steps):
        began = time.perf_counter()
        llm.engine.step()
        wall = time.perf_counter() - began
        walls.append(wall)
        hosts.append((wall - forward.seconds[-1]) / wall)
    each = (llm.engine.stats.output_tokens - before) / steps
    return each / statistics.median(walls), statistics.median(hosts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", default="smollm2")
    parser.add_argument("--format", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    llm = LLM(args.target, format=args.format, threads=args.threads)
    rows = rows_ms(llm, [1, 2, 4, 5, 8, 12, 16], args.rounds)
    batches = batch_speeds(llm, [1, 2, 4, 8, 16], 96, args.rounds)
    result = {
        "rows_ms": rows,
        "rows_8_over_1": round(rows[8] / rows[1], 3),
        "batches": batches,
        "batch_16_over_1": round(batches[16]["tok_s"] / batches[1]["tok_s"], 2),
        "command": vars(args),
        "machine": describe(torch.device("cpu")),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
