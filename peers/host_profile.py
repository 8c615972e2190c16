"""A profile of the host during rounds on a GPU: its calls of the CUDA runtime, and whether the device waits for it.

A round is in flight when profiling starts. If n launches were seen when the host waits for the n-th round, the next
round was in the device's queue before the host read the last one. `next_round_queued` counts these rounds; several
waits without a launch between them are for one round. `waits_a_round` counts all calls that wait for anything. (One
`cudaDeviceSynchronize` in all is the profiler's own, at its end.) Timings under a profiler mean little; `paceline bench
engine` measures speed.

    python -m peers.host_profile --target llama-3.1-8b --drafter llama-3.2-1b --acceptance 0.8
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from paceline.bench.engine import Setup, build, requests
from paceline.bench.engine_prompts import prompts_of
from paceline.engine.engine import Engine

WAITING_CALLS = ("Synchronize", "cudaMemcpy", "cuMemcpy", "cudaFree", "cudaMalloc")
NOT_WAITING = ("Async",)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    setup = Setup(
        target=args.target,
        drafter=args.drafter,
        batches=(args.batch,),
        draft=args.draft,
        acceptance=args.acceptance,
        device="cuda",
        output_tokens=16 + args.rounds * (args.draft + 1),
    )
    parts = build(setup, drafting=args.drafter is not None)
    prompts = prompts_of(setup, parts)
    mode: Any = "speculative" if args.drafter else "plain"
    for warm in (True, False):
        for request in requests(setup, args.batch, mode=mode, round=0, prompts=prompts):
            parts.engine.submit(request)
        if warm:
            drain(parts.engine)
    for _ in range(6):  # prefill and the first rounds
        parts.engine.step()
    print(json.dumps({"setup": vars(args), **profiled(parts.engine, rounds=args.rounds)}))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter")
    parser.add_argument("--acceptance", type=float)
    parser.add_argument("--draft", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    return parser.parse_args(argv)


def drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def profiled(engine: Engine, *, rounds: int) -> dict[str, Any]:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
        for _ in range(rounds):
            engine.step()
    drain(engine)
    torch.cuda.synchronize()
    return summary(seen.events(), rounds=rounds)


def summary(events: Any, *, rounds: int) -> dict[str, Any]:
    calls = [e for e in events if e.name.startswith("cu") and e.device_type == DeviceType.CPU]
    on_device = [e for e in events if e.device_type == DeviceType.CUDA]
    calls.sort(key=lambda e: e.time_range.start)
    launched, landed, queued, waited = 0, 0, 0, False
    waits = Counter(call.name for call in calls if _waits(call.name))
    for call in calls:
        if call.name == "cudaGraphLaunch":
            launched, waited = launched + 1, False
        elif call.name == "cudaEventSynchronize" and not waited:
            landed, waited = landed + 1, True
            queued += launched >= landed
    busy = merged([(e.time_range.start, e.time_range.end) for e in on_device])
    span = busy[-1][1] - busy[0][0] if busy else 0
    return {
        "rounds": rounds,
        "graph_launches": launched,
        "calls_a_round": {name: n / rounds for name, n in Counter(c.name for c in calls).most_common()},
        "waits_a_round": {name: n / rounds for name, n in waits.items()},
        "rounds_waited_for": landed,
        "next_round_queued": queued,
        "device_idle": 1 - sum(end - start for start, end in busy) / span if span else None,
    }


def _waits(name: str) -> bool:
    return any(word in name for word in WAITING_CALLS) and not any(word in name for word in NOT_WAITING)


def merged(ranges: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merge overlapping ranges."""
    out: list[tuple[float, float]] = []
    for start, end in sorted(ranges):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


if __name__ == "__main__":
    main()
