"""The command `paceline bench offline MODEL --grid`: every kind of prompts at every batch size and temperature."""

from __future__ import annotations

import json
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from paceline.cli.interrupts import interrupted_status
from paceline.cli.options import given, load
from paceline.cli.prompts_and_results import check_places, data_of
from paceline.config import EngineConfig
from paceline.errors import InvalidRequest
from paceline.progress import Progress, progress_bar

if TYPE_CHECKING:
    from paceline.bench.grid import Asked, Kind, Place
    from paceline.bench.workloads import BenchPrompt
    from paceline.llm import LLM

Encode = Callable[["LLM", "Sequence[BenchPrompt]", Namespace], "tuple[list[BenchPrompt], list[tuple[int, ...]]]"]
Record = dict[str, Any]
BY_BATCH = ("max_sequences", "max_draft")  # options of the engine that follow from the batch sizes and drafts asked for


def run(args: Namespace, *, encode: Encode) -> int:
    """Measure the grid, or what is left of it. `encode`: prompts to those that fit, and their tokens."""
    from paceline.bench.grid import Budget, in_order, run_places
    from paceline.bench.grid_file import append, resume
    from paceline.bench.grid_record import record, text

    _check(args)
    kinds, missing = _kinds(args)
    llm = load(args)
    if not llm.parts.drafters:
        raise InvalidRequest("nothing drafts: name a --drafter, such as ngram")
    places, setup = in_order(kinds, args.batch, args.temperature), _setup(args, llm)
    known = {} if args.save is None else {_name(each): each for each in resume(args.save, setup)}
    with progress_bar("measuring", unit="rounds") as progress:
        found, skipped, stopped = run_places(
            places,
            known,
            budget=Budget(args.minutes),
            measure=_measurement(llm, args, encode, progress),
            keep=(lambda each: None) if args.save is None else (lambda each: append(args.save, each)),
        )
    told = record(
        [found[place.name] for place in places if place.name in found],
        places,
        [(place.name, why) for place, why in skipped] + missing,
        _facts(args, setup, interrupted=stopped),
    )
    print(text(told))
    if args.json:
        print(json.dumps(told))
    return interrupted_status() if stopped else 0


def _check(args: Namespace) -> None:
    if args.html is not None or args.plots is not None:
        raise InvalidRequest("a grid has no report in HTML and no plots: leave out --html and --plots, use --json")
    if args.minutes is not None and args.minutes <= 0:
        raise InvalidRequest(f"--minutes must be above 0, not {args.minutes:g}")
    check_places(args)


def _kinds(args: Namespace) -> tuple[list[Kind], list[tuple[str, str]]]:
    """Return the kinds to measure, and the names of those that nobody has brought, with reasons."""
    from paceline.bench.grid import HARD_KINDS, SET_KINDS, Kind
    from paceline.bench.workloads import MADE
    from paceline.prompts.files import find

    known = {kind.name: kind for kind in (*SET_KINDS, *HARD_KINDS)}
    kinds, missing = [], []
    for name in dict.fromkeys(args.prompts or known):
        kind = known.get(name, Kind(name, name))
        try:
            if kind.source not in MADE:
                find(kind.source, data=data_of(args))
            kinds.append(kind)
        except InvalidRequest:
            if args.prompts:
                raise
            missing.append((name, "the set is in neither the package nor --data"))
    return kinds, missing


def _measurement(llm: LLM, args: Namespace, encode: Encode, progress: Progress) -> Callable[[Place], Record]:
    from paceline.bench.grid import arms, measure_place

    # Each kind is read and tokenised once.
    asked = cache(lambda kind: _asked(llm, kind, args, encode))

    def measure(place: Place) -> Record:
        progress.phase(place.name, unit="rounds", total=args.rounds)
        return measure_place(
            llm.engine,
            place,
            arms(list(llm.parts.drafters), args.draft, place, rule=args.rule),
            asked(place.kind),
            rounds=args.rounds,
            ignore_eos=args.ignore_eos,
            tick=progress.count,
        )

    return measure


def _asked(llm: LLM, kind: Kind, args: Namespace, encode: Encode) -> Asked:
    from paceline.bench.grid import Asked
    from paceline.bench.workloads import workload

    chosen = workload(
        [kind.source],
        data=data_of(args),
        count=args.count or args.rounds * max(args.batch),
        max_tokens=kind.max_tokens or args.max_tokens,
        seed=args.seed,
        words=lambda name: args.input_tokens,
    )
    return Asked(*encode(llm, chosen, args))


def _setup(args: Namespace, llm: LLM) -> Record:
    """Collect what must be the same for a file to go on."""
    import torch

    from paceline.bench.machine import describe

    names = ("count", "max_tokens", "input_tokens", "seed", "rounds", "rule", "raw", "ignore_eos", "threads")
    engine = {name: value for name, value in given(args, EngineConfig).items() if name not in BY_BATCH}
    return {
        "target": args.target,
        "how": llm.parts.target.why,
        "drafters": {name: made.how for name, made in llm.parts.drafters.items()},
        "draft": list(args.draft),
        **{name: getattr(args, name) for name in names},
        "engine": engine,
        "data": None if (data := data_of(args)) is None else str(data),
        "machine": describe(torch.device(llm.parts.target.device)),
    }


def _facts(args: Namespace, setup: Record, *, interrupted: bool) -> Record:
    command = shlex.join(["paceline", *sys.argv[1:]])
    return {**setup, "minutes": args.minutes, "interrupted": interrupted, "command": command}


def _name(measured: Record) -> str:
    """The `Place.name` of a stored place."""
    return f"{measured['kind']}, batch {measured['batch']}, T={measured['temperature']:g}"
