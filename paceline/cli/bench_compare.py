"""The command `paceline bench compare`: its options, and the exit status of a regression."""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any

from paceline.cli.options import numbers
from paceline.cli.prompts_and_results import add_pictures, draw

COMPARE = """Two saved results: what is better in the second, by how much, and how sure that is.

paceline bench compare before.json after.json
paceline bench compare before.json after.json --max-regression 5 --html report.html

Takes files that `bench serve` and `bench offline` saved (--save, or their output with --json), and those of
`vllm bench serve --save-detailed`. With --max-regression the exit status is 1 if anything is worse by more than so many
percent: the whole interval where there is one, else the figure itself.
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("first", type=Path, metavar="A.json")
    parser.add_argument("second", type=Path, metavar="B.json")
    parser.add_argument("--max-regression", type=_percent, metavar="PERCENT", help="exit with 1 beyond this")
    parser.add_argument("--json", action="store_true", help="everything as JSON in the last line")
    add_pictures(parser)


def run(args: Namespace) -> int:
    from paceline.bench.compare import compare, compared_conclusion, read, record, text

    first, second = read(args.first), read(args.second)
    found = compare(first, second)
    print(text(found))
    limit = args.max_regression
    worse = [] if limit is None else [each for each in found if each.worse_by(limit / 100)]
    for each in worse:
        print(f"regression: {each.run} {each.name} × {each.ratio.value:.3f}")
    compared, concluded = record(found), compared_conclusion(found)
    merged = _merged(first, second) | {"conclusion": concluded}
    draw(args, merged, title=f"{args.first.name} and {args.second.name}", compared=compared)
    if args.json:
        print(json.dumps({"compared": compared, "regressions": len(worse), "conclusion": concluded}))
    return 1 if worse else 0


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Both records as one, so that the same plots show both."""
    from paceline.bench.serve_text import runs_of

    if first.get("benchmark") == "offline":
        cells = [c | {"drafter": f"{c['drafter']} {side}"} for side, r in _sides(first, second) for c in r["cells"]]
        return second | {"cells": cells}
    runs = [r | {"arm": f"{r.get('arm', '')} {side}".strip()} for side, f in _sides(first, second) for r in runs_of(f)]
    return {"definition": second.get("definition", ""), "runs": runs}


def _sides(first: dict[str, Any], second: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [("first", first), ("second", second)]


def _percent(text: str) -> float:
    values = numbers(text)
    if len(values) != 1:
        raise ArgumentTypeError(f"one percentage such as 5 is needed, not {text!r}")
    return values[0]
