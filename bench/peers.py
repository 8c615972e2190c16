"""Paceline beside its peers: decode speed at batch 1, interleaved, every system with the same number of threads.

For each round and prompt every system generates the same number of tokens greedily, one system after the other in an
order that rotates, each in its own process. A machine that slows down for a while slows all of them down, and ratios
are taken between runs that lay next to each other. Prefill is not counted. The machine must have nothing else to do:
what other processes used meanwhile is measured and said. Prints a table and, with --json, writes every run.

    python -m bench.peers --suite plain --peers-python PEERS/bin/python --models PEERS/models
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from bench import prompts
from bench.report import Run, summarise, table, versus_peers
from bench.systems import SUITE_PROMPTS, System, Worker, machine_cpu_seconds, suite_systems
from paceline.bench.machine import describe

WARM_UP_TOKENS = 8
BUSY = 0.1  # of a core, used by other processes


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    chosen = prompts.load(args.prompts or SUITE_PROMPTS[args.suite], data=args.data, count=args.count)
    about = describe(torch.device("cpu"))
    with ExitStack() as stack:
        workers = [start(system, stack=stack, peers_python=args.peers_python) for system in choose(args)]
        runs = measure(workers, chosen, rounds=args.rounds, tokens=args.tokens)
    systems = [worker.system for worker in workers]
    versions = {worker.system.kind: worker.version for worker in workers}
    report(systems, runs, about={**about, "versions": versions, "command": sys.argv[1:]}, to=args.json)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=sorted(SUITE_PROMPTS), default="plain")
    parser.add_argument("--prompts", help="a prompt set or file (default: the suite's own)")
    parser.add_argument("--count", type=int, default=5, help="prompts, evenly spread over the set")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peers-python", type=Path, help="interpreter of the peers; without it Paceline runs alone")
    parser.add_argument("--models", type=Path, default=Path(), help="directory of the peers' models")
    parser.add_argument("--only", action="append", help="systems whose name contains this (repeatable)")
    parser.add_argument("--json", type=Path, help="write every run and the summary here")
    prompts.add_arguments(parser)
    return parser.parse_args(argv)


def choose(args: argparse.Namespace) -> list[System]:
    known = suite_systems(args.suite, models=args.models.resolve(), threads=args.threads)
    wanted = [s for s in known if not args.only or any(part in s.name for part in args.only)]
    chosen = [s for s in wanted if args.peers_python or not s.is_peer]
    names = {s.name for s in chosen}
    if not chosen:
        known_names = ", ".join(s.name for s in known)
        raise SystemExit(f"no system to measure; known: {known_names}. Peers need --peers-python")
    return [s if s.plain in names else replace(s, plain=None) for s in chosen]


def start(system: System, *, stack: ExitStack, peers_python: Path) -> Worker:
    note(f"loading {system.name}")
    worker = Worker(system, python=peers_python.absolute() if system.is_peer else Path(sys.executable))
    stack.callback(worker.close)
    return worker


def measure(workers: Sequence[Worker], chosen: Sequence[prompts.Prompt], *, rounds: int, tokens: int) -> list[Run]:
    for worker in workers:
        worker.ask(chosen[0].prompt, tokens=WARM_UP_TOKENS)
    runs = []
    for turn in range(rounds * len(chosen)):
        round_number, index = divmod(turn, len(chosen))
        first = turn % len(workers)
        for worker in [*workers[first:], *workers[:first]]:
            run = one_run(worker, prompt=chosen[index], round_number=round_number, tokens=tokens)
            runs.append(run)
        speeds = ", ".join(f"{run.system} {run.speed:.0f}" for run in runs[-len(workers) :])
        note(f"round {round_number + 1}/{rounds}, prompt {index + 1}/{len(chosen)}: {speeds}")
    return runs


def one_run(worker: Worker, *, prompt: prompts.Prompt, round_number: int, tokens: int) -> Run:
    before = machine_cpu_seconds() - worker.cpu_seconds()
    reply = worker.ask(prompt.prompt, tokens=tokens)
    elsewhere = machine_cpu_seconds() - worker.cpu_seconds() - before
    return Run(
        system=worker.system.name, round=round_number, prompt=prompt.id, elsewhere_s=max(0.0, elsewhere), **reply
    )


def report(systems: Sequence[System], runs: Sequence[Run], *, about: dict[str, Any], to: Path | None) -> None:
    summaries = [summarise(system, runs) for system in systems]
    ratios = versus_peers(systems, runs)
    print(table(summaries))
    for pair, ratio in ratios.items():
        print(f"{pair}: {ratio:.2f}")
    for summary in summaries:
        if summary.elsewhere > BUSY:
            print(
                f"! while {summary.system} ran, other processes used {summary.elsewhere:.0%} of a core: measure again"
            )
    print(json.dumps(about))
    if to is not None:
        speeds = [{"system": r.system, "round": r.round, "prompt": r.prompt, "tokens_s": r.speed} for r in runs]
        whole = {"about": about, "systems": [asdict(s) for s in summaries], "ratios": ratios, "runs": speeds}
        to.write_text(json.dumps(whole, indent=1) + "\n")


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
