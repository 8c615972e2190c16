"""Audit by --url: the same requests to running servers, and their texts compared. Loads no model."""

from __future__ import annotations

import asyncio
import json
from argparse import ArgumentParser, Namespace

from paceline.cli.interrupts import interrupted_status
from paceline.cli.options import count, given
from paceline.cli.prompts_and_results import data_of
from paceline.config import EngineConfig
from paceline.errors import InvalidRequest
from paceline.progress import progress_bar

OF_MODELS = ("target", "drafter", "threads", "rule", "threshold", "samples", "places", "html")  # options without effect


def add_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("servers instead of a model")
    group.add_argument(
        "--url", action="append", metavar="URL", help="of a server, such as http://127.0.0.1:8000; two or more"
    )
    group.add_argument("--key", metavar="KEY", help="an API key that all of them know (default: none)")
    group.add_argument(
        "--repeats",
        type=count,
        metavar="N",
        help="times that each server gets each request: more find more replicas behind an address (default: 1)",
    )
    group.add_argument(
        "--logprobs", action="store_true", help="compare the log-probability of each token too, in every bit"
    )


def check(args: Namespace) -> None:
    """Raise InvalidRequest for options that have no effect on servers."""
    if len(set(args.url)) < len(args.url):
        raise InvalidRequest("a server is named twice with --url: name each once, and use --repeats to ask it again")
    if len(args.url) < 2 and (args.repeats or 1) < 2:
        raise InvalidRequest("give --url twice or more, or --repeats for the replicas behind one address")
    named = [name for name in OF_MODELS if getattr(args, name) is not None]
    named += [name for name in ("format", "device") if getattr(args, name) != "auto"]
    named += [*given(args, EngineConfig), *(["raw"] if args.raw else [])]
    if named:
        option = "MODEL" if named[0] == "target" else f"--{named[0].replace('_', '-')}"
        raise InvalidRequest(f"{option} has no effect with --url: the servers have their own; leave it out")


def run(args: Namespace) -> int:
    from paceline.audit.cases import variants
    from paceline.audit.servers import cases, compare, facts, report
    from paceline.prompts.files import read_prompts

    prompts = read_prompts(args.prompts, data=data_of(args), count=args.count)
    sampled = variants(args.temperature, edits=args.edits, max_tokens=args.max_tokens)
    asked = cases(prompts, sampled, seed=args.seed, scored=args.logprobs)
    repeats = args.repeats or 1
    with progress_bar("asking") as progress:
        progress.phase("asking", unit="answers", total=len(asked) * len(args.url) * repeats)
        found = asyncio.run(
            compare(args.url, asked, repeats=repeats, at_once=max(args.at_once), key=args.key, said=progress.count)
        )
    print(report(found, args.url))
    if args.json:
        print(json.dumps(facts(found, args.url)))
    return 1 if not found.passed else interrupted_status() if found.interrupted else 0
