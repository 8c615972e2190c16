"""The command `paceline bench program`: its options, and the loading of its model."""

from __future__ import annotations

import json
import shlex
import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from paceline.cli.options import add_model_options, count, drafters_of, given, load
from paceline.config import EngineConfig
from paceline.progress import progress_bar

if TYPE_CHECKING:
    from paceline.llm import LLM

PROGRAM = """A program that answers each task several times: all runs at once, and the same calls one by one, in turns.

paceline bench program smollm2 --runs 64 --forks 8
paceline bench program smollm2-135m --device cuda --drafter ngram --json    # a shape: random weights

The tokens of both must be equal: same seeds, same text, whatever runs beside it. The exit status is 1 if they are not.
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_model_options(parser)
    parser.set_defaults(measure_speedup=False)
    group = parser.add_argument_group("work")
    group.add_argument("--runs", type=count, default=64, metavar="N", help="runs of the program (default: 64)")
    group.add_argument("--forks", type=count, default=8, metavar="N", help="answers of each run (default: 8)")
    group.add_argument("--max-tokens", type=count, default=32, metavar="N", help="of an answer (default: 32)")
    group.add_argument("--rounds", type=count, default=3, metavar="N", help="turns of both (default: 3)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="(default: 0)")
    parser.add_argument("--json", action="store_true", help="everything as JSON in the last line")


def run(args: Namespace) -> int:
    import torch

    from paceline.bench.machine import describe
    from paceline.bench.program import Setup, measure, text

    llm = _load(args)
    setup = Setup(runs=args.runs, forks=args.forks, max_tokens=args.max_tokens, rounds=args.rounds, seed=args.seed)
    with progress_bar("runs of a program", unit="turns") as progress:
        found = measure(llm, setup, tick=progress)
    found |= {
        "target": args.target,
        "how": llm.parts.target.why,
        "bitwise": llm.parts.bitwise,
        "drafters": {name: made.how for name, made in llm.parts.drafters.items()},
        "command": shlex.join(["paceline", *sys.argv[1:]]),
        "machine": describe(torch.device(llm.parts.target.device)),
    }
    print(text(found))
    if args.json:
        print(json.dumps(found))
    return 0 if found["identical"] else 1


def _load(args: Namespace) -> LLM:
    from paceline.models.shapes import is_shape

    if not is_shape(args.target):
        return load(args)
    from paceline.bench.program import random_llm

    options = {"threads": args.threads, "drafter": drafters_of(args), **given(args, EngineConfig)}
    return random_llm(args.target, format=args.format, device=args.device, **options)
