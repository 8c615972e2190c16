"""Options that benchmarks of prompts share, and where their results go."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.cli.files import add_data, write
from paceline.cli.options import count
from paceline.cli.progress import CLEAR_LINE
from paceline.errors import StorageError


def add_prompts(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--prompts",
        action="append",
        required=True,
        metavar="FILE|SET",
        help="JSON lines, ShareGPT, one prompt a line, a set such as spec_bench, or made up: random, sonnet; may be "
        "given several times",
    )
    add_data(group)
    group.add_argument("--count", type=count, metavar="N", help="prompts, evenly spread over all (default: 40)")
    group.add_argument("--max-tokens", type=count, default=128, metavar="N", help="longest answer (default: 128)")
    group.add_argument(
        "--input-tokens", type=count, default=256, metavar="N", help="of a made-up prompt (default: 256)"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and answers (default: 0)")


def add_results(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    group.add_argument("--json", action="store_true", help="everything as JSON in the last line")
    group.add_argument("--save", type=Path, metavar="FILE", help="the same into a file, for `paceline bench compare`")
    add_pictures(group)


def add_pictures(group: Any) -> None:
    group.add_argument("--html", type=Path, metavar="FILE", help="a report of one file, which needs nothing else")
    group.add_argument("--plots", type=Path, metavar="DIR", help="its plots as SVG, and PNG where matplotlib is there")


def check_places(args: Namespace) -> None:
    """What cannot be written is said before the work, not after it. What is there already stays until then."""
    for path in (args.save, args.html):
        if path is not None:
            write(path, "", mode="a")


def write_results(args: Namespace, found: dict[str, Any], *, title: str) -> None:
    if args.save is not None:
        write(args.save, json.dumps(found, indent=1))
    draw(args, found, title=title)
    if args.json:
        print(json.dumps(found))


def draw(args: Namespace, found: dict[str, Any], *, title: str, compared: Sequence[dict[str, Any]] = ()) -> None:
    from paceline.bench.charts import charts
    from paceline.bench.html import page
    from paceline.bench.plots import write_plots

    if args.html is not None:
        write(args.html, page(found, title=title, compared=compared))
    if args.plots is not None:
        try:
            write_plots(charts(found), args.plots)
        except OSError as error:
            raise StorageError(f"plots cannot be written to {args.plots} ({error}); choose another place") from error


def say(line: str) -> None:
    """How far it is, on one line of a terminal; nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"{CLEAR_LINE}{line}", end="", file=sys.stderr, flush=True)
