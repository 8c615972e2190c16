"""Reading prompts beside the peers: tokens a second, and seconds to the first token, by length.

Every system reads the same random tokens and answers with one. Systems take turns, each in its own process, in an order
that rotates from round to round. The first round warms up and does not count.

    python -m peers.reading --peers-python PEERS/bin/python --models PEERS/models > peers-reading.json
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.bench.machine import describe
from peers.run import note, start, without_paths
from peers.systems import Mode, Unusable, Worker, all_modes, machine_cpu_seconds
from peers.tables import markdown

LENGTHS = (1024, 4096)  # tokens
CONTEXT_TOKENS = 8192
VOCABULARY = 49_000  # tokens of SmolLM2 that are text
SEED = 0


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    modes = reading_modes(args.models.resolve(), only=args.only)
    with ExitStack() as stack:
        workers, versions, failures = start(modes, args, stack=stack)
        runs = measure(workers, lengths=args.lengths, rounds=args.rounds, failures=failures)
    found = {
        "benchmark": "reading beside peers",
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", "-m", "peers.reading", *without_paths(sys.argv[1:])]),
        "machine": describe(torch.device("cpu")),
        "versions": versions,
        "threads": args.threads,
        "runs": runs,
        "failures": failures,
    }
    note(table(found))
    print(json.dumps(found))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="tokens (default: 1024 4096)")
    parser.add_argument("--rounds", type=int, default=5, help="that count (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of every system (default: %(default)s)")
    parser.add_argument("--peers-python", type=Path, action="append", default=[], help="as of peers.run")
    parser.add_argument("--models", type=Path, default=Path(), help="directory of the peers' models")
    parser.add_argument("--only", action="append", help="modes whose name contains this (repeatable)")
    return parser.parse_args(argv)


def reading_modes(models: Path, *, only: Sequence[str] | None) -> list[Mode]:
    """The plain modes of all systems that a CPU runs fast; llama.cpp gets room for one long prompt."""
    modes = [mode for mode in all_modes(models=models) if mode.plain is None and not mode.slow]
    roomy = {"at_once": 1, "context": CONTEXT_TOKENS}
    modes = [replace(m, options=m.options | roomy) if m.kind == "llama.cpp" else m for m in modes]
    return [mode for mode in modes if not only or any(part in mode.name for part in only)]


def measure(
    workers: Sequence[Worker], *, lengths: Sequence[int], rounds: int, failures: dict[str, str]
) -> list[dict[str, Any]]:
    alive, runs = list(workers), []
    for turn in range(-1, rounds):
        for length in lengths:
            draw = random.Random(f"{SEED} {turn} {length}")
            prompt = [draw.randrange(3, VOCABULARY) for _ in range(length)]
            first = turn % len(alive) if alive else 0
            for worker in [*alive[first:], *alive[:first]]:
                try:
                    run = read(worker, prompt)
                except Unusable as error:
                    alive.remove(worker)
                    failures[worker.mode.name] = str(error)
                    note(f"! {worker.mode.name}: {error}")
                    continue
                runs += [run | {"round": turn}] if turn >= 0 else []
        note(f"round {turn + 1} of {rounds}")
    return runs


def read(worker: Worker, prompt: list[int]) -> dict[str, Any]:
    before = machine_cpu_seconds() - worker.cpu_seconds()
    reply = worker.ask([prompt], tokens=1, at_once=1)
    elsewhere = max(0.0, machine_cpu_seconds() - worker.cpu_seconds() - before)
    about = {"mode": worker.mode.name, "is_peer": worker.mode.is_peer, "length": len(prompt)}
    return about | {"seconds": reply["seconds"], "elsewhere_s": elsewhere}


def table(found: Mapping[str, Any]) -> str:
    """A row for each mode: tokens a second and the first token's seconds by length, medians over rounds."""
    runs: list[dict[str, Any]] = found["runs"]
    lengths = sorted({run["length"] for run in runs})
    names = list(dict.fromkeys(run["mode"] for run in runs))
    header = ["", *(f"{length:,} tokens: tokens/s" for length in lengths)]
    header += [f"first token of {lengths[-1]:,}, s"] if lengths else []
    rows = []
    for name in names:
        seconds = [_median(runs, name, length) for length in lengths]
        speeds = [f"{length / took:,.0f}" if took else "" for length, took in zip(lengths, seconds, strict=True)]
        rows.append([name, *speeds, f"{seconds[-1]:.2f}" if seconds[-1] else ""])
    return markdown(header, rows)


def ratios(found: Mapping[str, Any]) -> dict[int, float]:
    """The best of Paceline over the best peer, by length: medians over rounds of ratios within a round."""
    runs: list[dict[str, Any]] = found["runs"]
    result: dict[int, float] = {}
    for length in sorted({run["length"] for run in runs}):
        here = [run for run in runs if run["length"] == length]
        best = [
            tuple(min((r["seconds"] for r in here if r["round"] == turn and r["is_peer"] == peer), default=0.0)
                  for peer in (True, False))
            for turn in sorted({run["round"] for run in here})
        ]  # fmt: skip  # two numbers a round
        both = [theirs / mine for theirs, mine in best if theirs and mine]
        if both:
            result[length] = statistics.median(both)
    return result


def _median(runs: Sequence[Mapping[str, Any]], mode: str, length: int) -> float | None:
    seconds = [run["seconds"] for run in runs if run["mode"] == mode and run["length"] == length]
    return statistics.median(seconds) if seconds else None


if __name__ == "__main__":
    main()
