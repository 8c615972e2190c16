"""The cost of a step: by rows, by batch size, and the share of the host.

- rows: one sequence verifying drafts of 0 … 15 tokens, the forward pass alone;
- batch: plain decoding of 1 … 16 sequences, tokens/s and the share of a step outside of the forward pass.

All configurations take turns, `--rounds` times; medians.

    python -m peers.steps smollm2
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from paceline import LLM, SamplingParams
from paceline.bench.machine import describe
from paceline.draft import Draft
from paceline.kernels.base import Output
from paceline.kernels.cpu.build import load_library
from paceline.runner.batch import Share, build_batch
from paceline.types import Request

PROMPT = "The history of the bicycle begins long before anybody rode one to work. " * 8


def median_ms(run: Callable[[], Output], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1e3


def rows_ms(llm: LLM, rows: list[int], rounds: int) -> dict[int, float]:
    """Milliseconds of one pass over n rows of one sequence, behind about 130 tokens of context."""
    probes, tokens = llm.engine.probes, llm.encode(PROMPT)
    last = len(tokens) - 1
    times: dict[int, list[float]] = {n: [] for n in rows}
    with probes.seated(tokens, room=max(rows)) as lane:
        probes.read(lane, len(tokens))
        drafts = {n: Draft(tokens=(5,) * (n - 1)) for n in rows}
        batches = {n: build_batch(probes.lanes, [Share(lane, last, 1, draft)]) for n, draft in drafts.items()}
        for _ in range(rounds):
            for n, batch in batches.items():
                times[n].append(median_ms(partial(probes.forward, batch), 15))
    return {n: round(statistics.median(values), 3) for n, values in times.items()}


def batch_speeds(llm: LLM, sizes: list[int], tokens: int, rounds: int) -> dict[int, dict[str, float]]:
    """Plain decoding of n sequences: tokens/s, and the host's share of a step."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    speeds: dict[int, list[float]] = {n: [] for n in sizes}
    shares: dict[int, list[float]] = {n: [] for n in sizes}
    for _ in range(rounds):
        for n in sizes:
            for i in range(n):
                prompt = llm.encode(f"{i}. {PROMPT}")
                llm.engine.submit(Request(id=f"{i}", prompt=prompt, sampling=params))
            started: set[str] = set()
            while len(started) < n:
                started |= {event.request_id for event in llm.engine.step()}
            speed, share = _decode(llm, tokens // 2)
            speeds[n].append(speed)
            shares[n].append(share)
            while llm.engine.has_work:
                llm.engine.step()
    return {
        n: {"tok_s": round(statistics.median(speeds[n]), 1), "host_share": round(statistics.median(shares[n]), 4)}
        for n in sizes
    }


def _decode(llm: LLM, steps: int) -> tuple[float, float]:
    """Tokens/s over some steps of pure decoding, and the part of their time spent outside of the forward pass."""
    stats = llm.engine.stats
    before = stats.output_tokens
    walls, hosts = [], []
    for _ in range(steps):
        began, verified = time.perf_counter(), stats.time_verify
        llm.engine.step()
        wall = time.perf_counter() - began
        walls.append(wall)
        hosts.append(1 - (stats.time_verify - verified) / wall)
    each = (stats.output_tokens - before) / steps
    return each / statistics.median(walls), statistics.median(hosts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", default="smollm2")
    parser.add_argument("--format", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    llm = LLM(args.target, drafter=[], format=args.format, threads=args.threads)
    rows = rows_ms(llm, [1, 2, 4, 5, 8, 12, 16], args.rounds)
    batches = batch_speeds(llm, [1, 2, 4, 8, 16], 96, args.rounds)
    result = {
        "rows_ms": rows,
        "rows_8_over_1": round(rows[8] / rows[1], 3),
        "batches": batches,
        "batch_16_over_1": round(batches[16]["tok_s"] / batches[1]["tok_s"], 2),
        "variant": load_library().variant,
        "command": vars(args),
        "machine": describe(torch.device("cpu")),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
