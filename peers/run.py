"""Paceline beside its peers: chat, code, summaries and JSON, one prompt at a time and eight at once.

For each round, set and number of prompts at once, every mode of every system answers the same prompts greedily. Modes
run one after the other in a rotating order, each in its own process, so that a slow phase of the machine affects all of
them. Tokens per second count generated tokens, from the arrival of the prompts to the end of the last answer, prefill
included. The machine must be idle otherwise: CPU time of other processes is measured and reported. A system that cannot
be installed or crashes is named and left out.

    python -m peers.run --peers-python PEERS/bin/python --models PEERS/models --save peers.jsonl
    python -m peers.run --peers-python PEERS/bin/python --models PEERS/models --resume peers.jsonl
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from paceline.bench.machine import describe
from peers.results import Measurement, Results, create_results, resume_results
from peers.sets import SETS, Cell, Encode, Plan, Task, draw
from peers.systems import Mode, Unusable, Worker, all_modes, interpreter_of, machine_cpu_seconds
from peers.tables import best_ratios, best_table, disturbed, failed, whole_table

WARM_UP_TOKENS = 8
MAX_SLEEPING_SHARE = 0.05  # CPU time by wall time of a worker that has nothing to do


def main(argv: Sequence[str] | None = None, *, encode: Encode | None = None) -> None:
    args = parse(argv)
    plan = Plan(args.set or list(SETS), args.rounds, args.tokens, {1: args.count, 8: 8}, {1: args.slow_count, 8: 8})
    work = draw(plan, data=args.data, encode=encode or smollm2())
    modes = chosen(args)
    with ExitStack() as stack:
        workers, versions, failures = start(modes, args, stack=stack)
        about = facts(plan, modes, versions=versions)
        results = resume_results(args.resume, about) if args.resume else create_results(args.save, about)
        for name, why in failures.items():
            results.fail(name, why)
        check_idle(workers)
        measure(workers, work, plan=plan, results=results)
    show(results)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data = os.environ.get("PACELINE_DATA")
    parser.add_argument("--data", type=Path, default=Path(data) if data else None, help="(default: $PACELINE_DATA)")
    parser.add_argument("--set", action="append", choices=list(SETS), help="(default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most (default: %(default)s)")
    parser.add_argument("--count", type=int, default=2, help="prompts one at a time, a round (default: %(default)s)")
    parser.add_argument("--slow-count", type=int, default=1, help="the same for slow systems (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of every system (default: %(default)s)")
    parser.add_argument(
        "--peers-python", type=Path, action="append", default=[],
        help="an interpreter that has some of the peers (repeatable); without one Paceline runs alone",
    )  # fmt: skip  # a field a line would hide what belongs together
    parser.add_argument("--models", type=Path, default=Path(), help="directory of the peers' models")
    parser.add_argument("--only", action="append", help="modes whose name contains this (repeatable)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--save", type=Path, metavar="FILE", help="write every measurement here as it comes")
    where.add_argument("--resume", type=Path, metavar="FILE", help="go on with a file that --save began")
    return parser.parse_args(argv)


def smollm2() -> Encode:
    """Encode prompts by the chat template of SmolLM2, so that all systems read the same tokens."""
    from paceline.llm import LLM

    llm = LLM("smollm2", drafter=[])
    return lambda prompt: llm.encode_chat(prompt.messages)


def chosen(args: argparse.Namespace) -> list[Mode]:
    known = all_modes(models=args.models.resolve())
    found = [mode for mode in known if not args.only or any(part in mode.name for part in args.only)]
    if not found:
        raise SystemExit(f"no mode is called so; known: {'; '.join(mode.name for mode in known)}")
    return found


def start(
    modes: Sequence[Mode], args: argparse.Namespace, *, stack: ExitStack
) -> tuple[list[Worker], dict[str, str], dict[str, str]]:
    """Start the workers; return those that can be measured, versions by kind, and reasons for the others."""
    workers, versions, failures = [], {}, {}
    for mode in modes:
        note(f"loading {mode.name}")
        try:
            python = interpreter_of(mode.kind, pythons=args.peers_python) if mode.is_peer else Path(sys.executable)
            worker = Worker(mode, python=python.absolute(), threads=args.threads)
            stack.callback(worker.close)
            versions[mode.kind] = worker.started()
            workers.append(worker)
        except Unusable as error:
            failures[mode.name] = str(error)
            note(f"! {mode.name}: {error}")
    return workers, versions, failures


def facts(plan: Plan, modes: Sequence[Mode], *, versions: Mapping[str, str]) -> dict[str, Any]:
    counts = {"counts": {str(n): k for n, k in plan.counts.items()}}
    slow = {"slow_counts": {str(n): k for n, k in plan.slow_counts.items()}}
    about = {mode.name: {"system": mode.system, "plain": mode.plain, "is_peer": mode.is_peer} for mode in modes}
    return {
        "benchmark": "peers",
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", "-m", "peers.run", *without_paths(sys.argv[1:])]),
        "machine": describe(torch.device("cpu")),
        "versions": dict(versions),
        "plan": asdict(plan) | counts | slow,
        "modes": about,
    }


def without_paths(words: Sequence[str]) -> list[str]:
    """The words with paths cut to their last part: the rest means nothing on another machine."""
    return [Path(word).name if os.sep in word else word for word in words]


def check_idle(workers: Sequence[Worker]) -> None:
    """Warn of workers that use the CPU although they have nothing to do."""
    before = [worker.cpu_seconds() for worker in workers]
    time.sleep(1)
    for worker, used in zip(workers, before, strict=True):
        if worker.cpu_seconds() - used > MAX_SLEEPING_SHARE:
            note(f"! {worker.mode.name} uses {worker.cpu_seconds() - used:.0%} of a core while it should sleep")


def measure(workers: Sequence[Worker], work: Mapping[Cell, list[Task]], *, plan: Plan, results: Results) -> None:
    alive = list(workers)
    warm: set[str] = set()
    for turn, cell in enumerate(plan.cells()):
        first = turn % len(alive) if alive else 0
        for worker in [*alive[first:], *alive[:first]]:
            if results.has(worker.mode.name, cell) or cell[1] > (worker.mode.at_once or cell[1]):
                continue
            try:
                if worker.mode.name not in warm:
                    warm_up(worker, work, plan=plan)
                    warm.add(worker.mode.name)
                results.add(measure_one(worker, cell=cell, tasks=work[cell], plan=plan))
            except Unusable as error:
                alive.remove(worker)
                results.fail(worker.mode.name, str(error))
                note(f"! {worker.mode.name}: {error}")
        said = (f"{run.mode} {run.speed:.0f}" for run in results.measurements if run.cell == cell)
        note(f"round {cell[2] + 1}/{plan.rounds}, {cell[0]}, {cell[1]} at once: {'; '.join(said)}")


def warm_up(worker: Worker, work: Mapping[Cell, list[Task]], *, plan: Plan) -> None:
    """Answer reversed prompts at every concurrency: everything is set up, and no prefix of a real prompt is cached."""
    for (name, at_once, turn), tasks in work.items():
        if (name, turn) == (plan.sets[0], 0) and at_once <= (worker.mode.at_once or at_once):
            worker.ask([task.tokens[::-1] for task in tasks], tokens=WARM_UP_TOKENS, at_once=at_once)


def measure_one(worker: Worker, *, cell: Cell, tasks: Sequence[Task], plan: Plan) -> Measurement:
    name, at_once, turn = cell
    mine = tasks[: plan.slow_counts[at_once]] if worker.mode.slow else tasks
    before = machine_cpu_seconds() - worker.cpu_seconds()
    reply = worker.ask([task.tokens for task in mine], tokens=plan.tokens, at_once=at_once)
    elsewhere = machine_cpu_seconds() - worker.cpu_seconds() - before
    return Measurement(
        set=name, at_once=at_once, round=turn, mode=worker.mode.name, prompts=[task.id for task in mine],
        elsewhere_s=max(0.0, elsewhere), **reply,
    )  # fmt: skip  # a field a line would hide what belongs together


def show(results: Results) -> None:
    for at_once in map(int, results.about["plan"]["counts"]):
        print(f"{at_once} at once, tokens/s: median over rounds (lowest–highest)\n")
        print(whole_table(results, at_once=at_once) + "\n")
    print(best_table(results) + "\n")
    print(best_ratios(results) + "\n")
    for line in (*failed(results), *disturbed(results)):
        print(f"! {line}")


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
