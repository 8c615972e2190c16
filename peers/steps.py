"""The cost of a step: by rows, by batch size, and the share of the host.

- rows: one sequence verifying drafts of 0 … 15 tokens, the forward pass alone;
- batch: plain decoding of 1 … 16 sequences, tokens/s and the host's own time as a share of a step;
- step over pass: how much longer a step of one sequence takes than its pass alone. The host works beside the next pass
  where it can, so this is what the host costs.

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

SETTLING_STEPS = 40  # steps before a measurement: after other passes, 32 may go by until one is prefetched again
PROMPT = "The history of the bicycle begins long before anybody rode one to work. " * 8


def median_ms(run: Callable[[], Output], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1e3


def rows_ms(llm: LLM, rows: list[int]) -> dict[int, float]:
    """Milliseconds of one pass over n rows of one sequence, behind about 130 tokens of context."""
    probes, tokens = llm.engine.probes, llm.encode(PROMPT)
    last = len(tokens) - 1
    with probes.seated(tokens, room=max(rows)) as lane:
        probes.read(lane, len(tokens))
        drafts = {n: Draft(tokens=(5,) * (n - 1)) for n in rows}
        batches = {n: build_batch(probes.lanes, [Share(lane, last, 1, draft)]) for n, draft in drafts.items()}
        return {n: median_ms(partial(probes.forward, batch), 15) for n, batch in batches.items()}


def batch_speed(llm: LLM, size: int, tokens: int) -> tuple[float, float]:
    """Plain decoding of `size` sequences: tokens/s, and the host's own time as a share of a step."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for i in range(size):
        prompt = llm.encode(f"{i}. {PROMPT}")
        llm.engine.submit(Request(id=f"{i}", prompt=prompt, sampling=params))
    started: set[str] = set()
    while len(started) < size:
        started |= {event.request_id for event in llm.engine.step()}
    for _ in range(SETTLING_STEPS):
        llm.engine.step()
    found = _decode(llm, tokens // 2)
    while llm.engine.has_work:
        llm.engine.step()
    return found


def _decode(llm: LLM, steps: int) -> tuple[float, float]:
    """Tokens/s over some steps of pure decoding, and the part of their time in which nobody waits for a pass."""
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
    passes, decoded = [], []  # of each round
    for _ in range(args.rounds):
        passes.append(rows_ms(llm, [1, 2, 4, 5, 8, 12, 16]))
        decoded.append({n: batch_speed(llm, n, 96) for n in (1, 2, 4, 8, 16)})
    rows = {n: statistics.median(each[n] for each in passes) for n in passes[0]}
    speeds = {n: statistics.median(each[n][0] for each in decoded) for n in decoded[0]}
    shares = {n: statistics.median(each[n][1] for each in decoded) for n in decoded[0]}
    over_pass = [1e3 / each[1][0] / alone[1] for each, alone in zip(decoded, passes, strict=True)]
    result = {
        "rows_ms": {n: round(milliseconds, 3) for n, milliseconds in rows.items()},
        "rows_8_over_1": round(rows[8] / rows[1], 3),
        "batches": {n: {"tok_s": round(speeds[n], 1), "host_share": round(shares[n], 4)} for n in speeds},
        "batch_16_over_1": round(speeds[16] / speeds[1], 2),
        "step_over_pass": round(statistics.median(over_pass), 4),
        "variant": load_library().variant,
        "command": vars(args),
        "machine": describe(torch.device("cpu")),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
