"""Drafters: what can draft for a model here, what each needs, and the command that uses it.

paceline drafters smollm2
paceline drafters ./model.gguf --in ~/models
paceline drafters ./model.gguf --in ~/models --measure
paceline drafters smollm2 --results docs/results/drafters.jsonl --json

Lists heads that come with Paceline, layers in the checkpoint, models on this disk, models and heads in a directory,
lookups, and what can be trained. What cannot be used has a line that says why. Only headers of files are read. Speeds
are those of stored results, or of those that come with Paceline; --measure runs a short study of each pair.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.list import models_here
from paceline.cli.options import add_model_options, engine_config
from paceline.cli.pair import ASKED, pair_lines, pairs_of, unjudged
from paceline.cli.style import Style
from paceline.errors import InvalidRequest
from paceline.progress import progress_bar

if TYPE_CHECKING:
    from paceline.tune.available import Available

UNMEASURED = {"prediction": "it drafts only for requests that bring a prediction"}  # drafter → why no study judges it


def add_arguments(parser: ArgumentParser) -> None:
    add_model_options(parser)
    parser.add_argument("--in", type=Path, dest="folder", metavar="DIR", help="list the models and heads in it, too")
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="stored figures, as `python -m peers.drafters` saves them"
    )
    parser.add_argument(
        "--measure", action="store_true", help="judge each pair by a short study, as `inspect --pair` does: minutes"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a drafter")


def run(args: Namespace) -> int:
    if args.drafter:
        raise InvalidRequest("all drafters are listed: leave out --drafter; `paceline inspect --pair` judges one")
    found = _found(args)
    pairs = _pairs(args, found) if args.measure else {}
    if args.json:
        for each in found:
            print(json.dumps({**asdict(each), "pair": pairs.get(each.drafter)}))
    else:
        _print(args.target, found, pairs)
    return 0


def _found(args: Namespace) -> list[Available]:
    from paceline.engine.assemble import read_target
    from paceline.runner.loading.models import choose_device
    from paceline.tune.available import available

    with progress_bar(f"reading {args.target}") as progress:
        target = read_target(args.target, format=args.format, config=engine_config(args), progress=progress)
        names = [model.name for model in models_here()]
        device = choose_device(args.device)
        return available(target, names, device=device, folder=args.folder, results=args.results)


def _pairs(args: Namespace, found: list[Available]) -> dict[str, dict[str, Any]]:
    from paceline.tune.available import UNTRAINED

    words = [each.drafter for each in found if each.why_not is None and each.origin != UNTRAINED]
    left = {each: "its name has a comma, which ends the name of a candidate" for each in words if "," in each}
    left |= {each: why for each, why in UNMEASURED.items() if each in words}
    told = pairs_of(args, asked={**ASKED, "candidates": ",".join(each for each in words if each not in left)})
    return {pair["drafter"]: pair for pair in (*told, *(unjudged(each, why) for each, why in left.items()))}


def _print(target: str, found: list[Available], pairs: dict[str, dict[str, Any]]) -> None:
    from paceline.tune.available import lines_of

    style = Style(sys.stdout)
    for drafter, lines in lines_of(found):
        print(style.bold(drafter))
        for line in (*lines, *(pair_lines(pairs[drafter]) if drafter in pairs else ())):
            print(f"  {line}")
    if not pairs:
        print(f"\nWhether one helps on this machine: paceline drafters {target} --measure")
