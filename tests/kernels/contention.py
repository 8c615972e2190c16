"""Measure how much longer a pass takes beside a busy loop on one core: `make contention`.

Passes of SmolLM2 over several numbers of rows, in turns: alone, then beside the loop on one of two CPUs. A fair share
of two cores would make a pass 1.33 times as long. The command fails where the median is over LIMIT.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from paceline.config import EngineConfig
from paceline.engine.assemble import read_target
from paceline.runner.batch import Share, build_batch
from paceline.runner.lanes import Lanes
from tests.kernels.neighbour import busy_loop, two_cpus

LIMIT = 1.6  # times as long as alone
ROWS = (1, 8, 64)
ROUNDS = 6
SECONDS = 0.4  # of each measurement
CONTEXT = 100  # tokens before the rows


def main() -> int:
    cpus = two_cpus()
    if len(cpus) < 2:
        print("contention: two CPUs are needed")
        return 0
    forward = read_target("smollm2", config=EngineConfig()).forward(num_pages=32, threads=len(cpus), max_context=512)
    lanes = Lanes(count=1, max_context=512, max_draft=8)
    lane = lanes.take()
    lanes.tokens_np[lane, :] = 5
    lanes.pages_np[lane, :32] = np.arange(32)
    forward(build_batch(lanes, [Share(lane=lane, start=0, count=CONTEXT, outs=1)]))
    worst = 0.0
    for rows in ROWS:
        batch = build_batch(lanes, [Share(lane=lane, start=CONTEXT, count=rows, outs=1)])
        ratio = _ratio(lambda batch=batch: forward(batch), cpus)  # type: ignore[misc]
        print(f"{rows:>3} rows: {ratio:.2f} times as long beside a busy loop", flush=True)
        worst = max(worst, ratio)
    return int(worst > LIMIT)


def _ratio(run: Callable[[], object], cpus: list[int]) -> float:
    """Median ratio of neighbouring measurements."""
    ratios = []
    for number in range(ROUNDS):
        alone = _mean_seconds(run)
        with busy_loop(cpus[number % 2]):
            ratios.append(_mean_seconds(run) / alone)
    return statistics.median(ratios)


def _mean_seconds(run: Callable[[], object]) -> float:
    start, passes = time.perf_counter(), 0
    while time.perf_counter() < start + SECONDS:
        run()
        passes += 1
    return (time.perf_counter() - start) / passes


if __name__ == "__main__":
    sys.exit(main())
