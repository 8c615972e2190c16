"""The command `paceline bench ramp`: a load that rises and falls, with the default settings and without drafters."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.bench_offline import encoded, facts_of
from paceline.cli.interrupts import interrupted_status
from paceline.cli.options import add_model_options, count, load, temperatures
from paceline.cli.prompts_and_results import add_prompts, check_places, prompts_of, write
from paceline.errors import InvalidRequest
from paceline.progress import Progress, progress_bar

if TYPE_CHECKING:
    from paceline.bench.ramp import Pair, Ramp
    from paceline.llm import LLM

DEFAULT_PROMPTS = ["mt_bench"]
RAMP = """A load that rises from one request to many and falls again: is speculation ever slower than none?

paceline bench ramp smollm2
paceline bench ramp smollm2 --most 16 --seconds 40 --rounds 2 --temperature 0,1 --save ramp.json

Two engines in one process take turns of a fraction of a second: one without drafters, one with the default settings.
Each has a clock that runs only while it works, and both are led through the same load. Windows of 5 s are compared.
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_model_options(parser)
    add_prompts(parser, required=False)
    parser.add_argument("--raw", action="store_true", help="continue prompts as they are, without the chat template")
    group = parser.add_argument_group("load")
    group.add_argument("--most", type=count, default=64, metavar="N", help="requests at the top (default: 64)")
    group.add_argument("--seconds", type=count, default=120, metavar="S", help="of each engine (default: 120)")
    group.add_argument("--window", type=count, default=5, metavar="S", help="seconds of a window (default: 5)")
    group.add_argument("--rounds", type=count, default=5, metavar="N", help="repetitions (default: 5)")
    group.add_argument(
        "--temperature", type=temperatures, default=(0.0,), metavar="X,X,…", help="of requests in turn (default: 0)"
    )
    parser.add_argument("--json", action="store_true", help="everything as JSON in the last line")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the JSON to a file")


def run(args: Namespace) -> int:
    from paceline.bench.ramp import Ramp
    from paceline.bench.ramp_record import record, text

    ramp = Ramp(args.most, args.seconds, args.window)
    if not ramp.windows:
        raise InvalidRequest(f"{args.seconds} s have no window of {args.window} s: raise --seconds")
    args.prompts, args.html = args.prompts or DEFAULT_PROMPTS, None
    chosen = prompts_of(args, words=lambda kind: args.input_tokens)
    check_places(args)
    if args.max_sequences is None:
        args.max_sequences = args.most
    plain, default = load(Namespace(**vars(args) | {"drafter": ["none"]})), load(args)
    if not default.parts.drafters:
        raise InvalidRequest("nothing drafts: name a --drafter, such as ngram")
    prompts, tokens = encoded(default, chosen, args)
    pairs, interrupted = _pairs(args, ramp, (plain, default), prompts, tokens)
    facts = facts_of(args, default) | {"temperatures": args.temperature, "interrupted": interrupted}
    found = record(pairs, ramp, facts)
    print(text(found))
    if args.save is not None:
        write(args.save, json.dumps(found, indent=1))
    if args.json:
        print(json.dumps(found))
    return interrupted_status() if interrupted else 0


def _pairs(args: Namespace, ramp: Ramp, engines: tuple[LLM, LLM], prompts: Any, tokens: Any) -> tuple[list[Pair], bool]:
    """Run all rounds, or those before Ctrl-C."""
    from paceline.bench.ramp import run_pair

    pairs: list[Pair] = []
    try:
        with progress_bar("ramp", unit="seconds") as progress:
            for number in range(args.rounds):
                pair = run_pair(
                    (engines[0].engine, engines[1].engine),
                    ramp,
                    prompts,
                    tokens,
                    temperatures=args.temperature,
                    number=number,
                    tick=partial(_tick, progress, number * args.seconds, args.rounds * args.seconds),
                )
                pairs.append(pair)
    except KeyboardInterrupt:
        if not pairs:
            raise
        return pairs, True
    return pairs, False


def _tick(progress: Progress, before: int, total: int, now: float) -> None:
    progress(before + int(now), total)
