"""Options and files that benchmarks and the audit share: where prompt sets are found, and where results go."""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser, Namespace, _ArgumentGroup
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.options import count
from paceline.errors import StorageError

if TYPE_CHECKING:
    from paceline.bench.workloads import BenchPrompt


def add_prompts(parser: ArgumentParser, *, required: bool = True) -> None:
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--prompts",
        action="append",
        required=required,
        metavar="FILE|SET",
        help="JSON lines, ShareGPT, one prompt a line, a set such as spec_bench, or synthetic: random, sonnet; may "
        "be given several times",
    )
    add_data(group)
    group.add_argument("--count", type=count, metavar="N", help="prompts, evenly spread over all (default: 40)")
    group.add_argument("--max-tokens", type=count, default=128, metavar="N", help="longest answer (default: 128)")
    group.add_argument(
        "--input-tokens", type=count, default=256, metavar="N", help="of a synthetic prompt (default: 256)"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and answers (default: 0)")


def add_data(group: _ArgumentGroup) -> None:
    group.add_argument(
        "--data", type=Path, metavar="DIR", help="prompt sets that go before the shipped ones (default: $PACELINE_DATA)"
    )


def data_of(args: Namespace) -> Path | None:
    """Directory of prompt sets: --data, else $PACELINE_DATA."""
    return args.data or data_of_environment()


def data_of_environment() -> Path | None:
    given = os.environ.get("PACELINE_DATA")
    return Path(given) if given else None


def prompts_of(args: Namespace, *, words: Callable[[str], int]) -> list[BenchPrompt]:
    """Read the prompts that the options name. `words`: length of a synthetic prompt, by its kind."""
    from paceline.bench.workloads import workload

    return workload(
        args.prompts,
        data=data_of(args),
        count=args.count,
        max_tokens=args.max_tokens,
        seed=args.seed,
        words=words,
    )


def add_results(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    group.add_argument("--json", action="store_true", help="everything as JSON in the last line")
    group.add_argument(
        "--save", type=Path, metavar="FILE", help="write the JSON to a file, for `paceline bench compare`"
    )
    add_pictures(group)


def add_pictures(group: Any) -> None:
    group.add_argument("--html", type=Path, metavar="FILE", help="write a self-contained report")
    group.add_argument(
        "--plots", type=Path, metavar="DIR", help="write plots as SVG, and as PNG if matplotlib is installed"
    )


def check_places(args: Namespace) -> None:
    """Raise for a result file that cannot be written, before any work."""
    for path in (args.save, args.html):
        if path is not None:
            check_place(path)


def check_place(path: Path) -> None:
    """Raise for a file that cannot be written. One that is there keeps its content; no other one is left behind."""
    there = path.exists()
    write(path, "", mode="a")
    if not there:
        path.unlink()


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


def write(path: Path, text: str, *, mode: str = "w") -> None:
    """Write a file, with its directories."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise StorageError(f"{path} cannot be written ({error}); choose another place") from error
