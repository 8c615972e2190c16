"""Replay: what recorded traffic would be with another drafter, draft length or batch.

paceline replay served.jsonl --drafter ngram --draft 4,8 --batch 4,16 --html replay.html
paceline replay served.jsonl --acceptance 0.7
paceline replay served.jsonl --real http://127.0.0.1:8000 --speed 2

RECORD is what `paceline serve --record FILE --record-share 1` wrote. Without --real the traffic runs in simulated time:
the engine's own scheduler and governor, with passes timed on this machine and drafts of a short run on a sample of the
requests. With --real every request is sent to a server when it is due. Exit status: 0 all answered, 1 some requests
failed or the server went away. Ctrl-C or SIGTERM ends it with a report on what is complete.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.bench_serve import without_key
from paceline.cli.interrupts import interrupted_status
from paceline.cli.options import add_model_options, count, counts, engine_config, load, numbers
from paceline.cli.prompts_and_results import add_results, check_places, write_results
from paceline.config import EngineConfig
from paceline.errors import InvalidRequest
from paceline.progress import Progress, progress_bar

if TYPE_CHECKING:
    from paceline.bench.serve import LoadRun
    from paceline.llm import LLM
    from paceline.replay.arrivals import Schedule
    from paceline.replay.simulate import Run
    from paceline.replay.traffic import Traffic
    from paceline.replay.what_if import Plan, WhatIf

UNLIMITED = 1 << 40  # tokens: a server itself refuses what its context does not hold


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("record", metavar="RECORD", type=Path, help="a file of `paceline serve --record`")
    add_model_options(parser, default_target="smollm2")
    group = parser.add_argument_group("what if")
    group.add_argument("--batch", type=counts, metavar="N,N,…", help="sequences that run at once (default: 64)")
    group.add_argument("--draft", type=counts, metavar="N,N,…", help="tokens of the longest draft (default: 16)")
    group.add_argument(
        "--acceptance",
        type=_acceptance,
        metavar="X|record|sample",
        help="of a drafted token whose predecessors are right: a number, the record's own statistics, or a run of the "
        "model on sampled requests (default: sample; record if it has no texts)",
    )
    group.add_argument("--sample", type=count, default=12, metavar="N", help="requests of the sample (default: 12)")
    group.add_argument(
        "--scale",
        type=_factor,
        metavar="X",
        help="factor of all measured times (default: calibrated on the times of the record, if it can be)",
    )
    group.add_argument(
        "--stream-interval", type=_seconds, default=0.02, metavar="S", help="of the server (default: 0.02)"
    )
    group = parser.add_argument_group("traffic")
    group.add_argument("--speed", type=_factor, default=1.0, metavar="X", help="time runs so much faster (default: 1)")
    group.add_argument("--rate", type=_factor, metavar="R", help="Poisson arrivals a second, instead of recorded times")
    group.add_argument("--output-tokens", type=count, metavar="N", help="of answers whose end was not recorded")
    group.add_argument("--any-model", action="store_true", help="take a record of a model with another served name")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of arrivals and drafts (default: 0)")
    group = parser.add_argument_group("for real")
    group.add_argument("--real", metavar="URL", help="send the requests to this server instead of simulating it")
    group.add_argument("--api-key", metavar="KEY", help="(default: $OPENAI_API_KEY)")
    group.add_argument("--timeout", type=_factor, default=600.0, metavar="S", help="of a silent server (default: 600)")
    group.add_argument(
        "--against", type=Path, metavar="FILE", help="saved by --real --save: also print the errors of the simulation"
    )
    add_results(parser)


def run(args: Namespace) -> int:
    from paceline.replay.traffic import read_traffic

    _check(args)
    check_places(args)
    real = _saved(args.against) if args.against is not None else None
    traffic = read_traffic(args.record)
    found = _really(args, traffic) if args.real else _simulated(args, traffic, real)
    from paceline.replay.report import text

    print(text(found))
    write_results(args, found, title=f"Replay of {args.record.name}")
    if found["interrupted"]:
        return interrupted_status()
    return 0 if all(run["completed"] and not run["failed"] and not run["not_sent"] for run in found["runs"]) else 1


def _check(args: Namespace) -> None:
    for mine, other, name in ((args.batch, args.max_sequences, "sequences"), (args.draft, args.max_draft, "draft")):
        if mine is not None and other is not None:
            raise InvalidRequest(
                f"--{'batch' if name == 'sequences' else name} and --max-{name} are one limit: give one"
            )
    if args.real and (args.against or args.batch or args.draft or args.acceptance is not None):
        raise InvalidRequest("--real asks a server as it is: leave out --batch, --draft, --acceptance and --against")
    if args.device not in ("auto", "cpu") and not args.real:
        raise InvalidRequest("a simulation is of steps on a CPU: leave --device out, or replay with --real URL")


def _saved(path: Path) -> dict[str, Any]:
    """Read the run that `--real --save` wrote."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        [run] = [run for run in found["runs"] if run["load"] == "real"]
        return dict(run)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InvalidRequest(f"{path} has no real replay ({error}): make one with --real URL --save {path}") from None


# ── in simulated time ──


def _simulated(args: Namespace, traffic: Traffic, real: dict[str, Any] | None) -> dict[str, Any]:
    from paceline.replay.calibrate import Calibration, calibrate
    from paceline.replay.report import (
        errors_against,
        record,
        recorded_outcomes,
        recorded_run,
        simulated_run,
        unknowns,
    )
    from paceline.replay.simulate import simulate

    _check_model(args, traffic)
    outside = None if real is None else real.get("median_delivery_ms")
    with progress_bar("loading", unit="") as progress:
        plan = _measured(args, traffic, progress)
        schedule = plan.schedule
        progress.phase("calibrating on the record")
        delivery = schedule.delivery if outside is None else outside / 1e3
        given = Calibration(args.scale, 1.0, f"scaled by {args.scale:g}, as given") if args.scale else None
        scaling = given or calibrate(plan.settings, schedule)
        runs: list[Run] = []
        for setting in plan.settings:
            progress.phase(f"simulating {setting.name}", unit="answers", total=len(schedule.arrivals))
            times = setting.times.scaled(scaling.scale, reading=scaling.reading)
            now = replace(setting, times=times, delivery=delivery)
            runs.append(simulate(now, schedule.arrivals, tick=progress.count))
            if runs[-1].interrupted:
                break
    recorded = recorded_outcomes(schedule)
    rows = [*([recorded_run(recorded)] if recorded else []), *map(simulated_run, runs)]
    facts = {
        **_facts(args),
        **plan.facts,
        "scale": scaling.scale,
        "reading": scaling.reading,
        "scaling": scaling.source,
        "delivery": delivery,
        "delivery_source": "the record" if outside is None else "the real replay",
    }
    found = record(rows, facts, notes=[*schedule.notes, *unknowns(schedule)])
    if real is not None:
        found["errors_against"] = errors_against(rows[-1], real)
    return found


def _measured(args: Namespace, traffic: Traffic, progress: Progress) -> Plan:
    """Load the model, measure it, and let it go: beside its objects a simulation would be many times slower."""
    from paceline.replay.what_if import Plan, measure, settings

    asked = _what_if(args)
    args.device, args.max_sequences, args.max_draft = "cpu", max(asked.batches), max(asked.drafts)
    llm = load(args)
    _check_vocabulary(traffic, llm)
    schedule = _schedule(args, traffic, max_context=llm.parts.memory.max_context)
    progress.phase("measuring passes and a sample of requests")
    measured = measure(llm, schedule, asked, has_texts=traffic.has_texts, tick=progress.count)
    facts = {
        "target": args.target,
        "drafters": [*llm.parts.drafters],
        "acceptance": None if measured.drafts is None else measured.drafts.source,
        "times": measured.times.record(),
    }
    made = settings(llm, engine_config(args), measured, asked)
    return Plan(schedule, made, facts)


def _what_if(args: Namespace) -> WhatIf:
    from paceline.replay.what_if import WhatIf

    config = EngineConfig()
    return WhatIf(
        batches=args.batch or (args.max_sequences or config.max_sequences,),
        drafts=args.draft or (args.max_draft or config.max_draft,),
        acceptance=args.acceptance,
        sample=args.sample,
        stream_interval=args.stream_interval,
        seed=args.seed,
    )


def _check_model(args: Namespace, traffic: Traffic) -> None:
    from paceline.models.resolve import served_name

    name = served_name(args.target)
    others = sorted({request.model for request in traffic.requests} - {name, ""})
    if others and not args.any_model:
        raise InvalidRequest(
            f"the record is of the model {', '.join(others)}, and {args.target} is served as {name}: name the model "
            "that was recorded, or pass --any-model if it only had another name"
        )


def _check_vocabulary(traffic: Traffic, llm: LLM) -> None:
    size = llm.engine.probes.forward.vocab_size
    for request in traffic.requests:
        if request.tokens and max(request.tokens) >= size:
            raise InvalidRequest(
                f"{request.where}: token {max(request.tokens)} is outside of the vocabulary of {size}: the record is "
                "of another model"
            )


def _schedule(args: Namespace, traffic: Traffic, *, max_context: int) -> Schedule:
    from paceline.replay.arrivals import schedule

    return schedule(
        traffic,
        max_context=max_context,
        rate=args.rate,
        output_tokens=args.output_tokens,
        speed=args.speed,
        seed=args.seed,
    )


# ── for real ──


def _really(args: Namespace, traffic: Traffic) -> dict[str, Any]:
    from paceline.replay.report import real_record, record

    schedule = _schedule(args, traffic, max_context=UNLIMITED)
    runs: list[LoadRun] = []
    interrupted = False
    try:
        asyncio.run(_send(args, schedule, runs))
    except KeyboardInterrupt:
        if not runs:
            raise
        interrupted = True
    facts = _facts(args) | {"speed": args.speed}
    asked = len(schedule.arrivals)
    found = [real_record(run, asked=asked, interrupted=interrupted) for run in runs]
    return record(found, facts, notes=schedule.notes)


async def _send(args: Namespace, schedule: Schedule, runs: list[LoadRun]) -> None:
    from paceline.bench.client import Client
    from paceline.bench.serve import Arm
    from paceline.replay.real import prompt_of, real_run, replay_real

    for arrival in schedule.arrivals:
        prompt_of(arrival)  # raises before anything is sent
    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    client = Client(args.real, endpoint="completions", key=key, timeout=args.timeout)
    try:
        arm = Arm("real", client, await client.first_model())
        runs.append(real_run(arm))
        with progress_bar("replaying", unit="") as progress:
            progress.phase("replaying", unit="answers", total=len(schedule.arrivals))
            await replay_real(arm, schedule.arrivals, runs[0], tick=lambda outcome: progress.count())
    finally:
        await client.close()


def _facts(args: Namespace) -> dict[str, Any]:
    import torch

    from paceline.bench.machine import describe

    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "command": shlex.join(["paceline", *without_key(sys.argv[1:])]),
        "client_machine": describe(torch.device("cpu")),
        "record": str(args.record),
    }


# ── options ──


def _acceptance(text: str) -> float | str:
    if text in ("record", "sample"):
        return text
    [found] = numbers(text) if "," not in text else (2.0,)
    if found > 1:
        raise ArgumentTypeError(f"a probability from 0 to 1, `record` or `sample` is needed, not {text!r}")
    return found


def _seconds(text: str) -> float:
    [found] = numbers(text) if "," not in text else (-1.0,)
    if found < 0:
        raise ArgumentTypeError(f"a number of seconds is needed, not {text!r}")
    return found


def _factor(text: str) -> float:
    found = _seconds(text)
    if not found:
        raise ArgumentTypeError("a number above 0 is needed")
    return found
