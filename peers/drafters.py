"""Every drafter on every prompt set: `paceline bench offline` for each, and the table of docs/drafters.md.

    python -m peers.drafters --minutes 60                       measure what is missing, then write the table
    python -m peers.drafters --qwen A.gguf --sibling B.gguf     also the Qwen2.5-Coder pair, and SmolLM2 over a bridge
    python -m peers.drafters --page                             write the table alone
    python -m peers.drafters --list                             show the commands that are left

A cell is one drafter on one set in one format: 10 prompts, 64 tokens each, greedy, one at a time, in turns with plain
decoding. Each is appended to docs/results/drafters.jsonl when it is measured: the same command goes on where the last
one ended. `paceline drafters MODEL --results FILE` shows them.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bench.grid import Budget
from paceline.bench.grid_file import append, resume
from paceline.bench.machine import describe
from paceline.bench.serve_text import number, ratio_text
from paceline.drafters.registry import PORTFOLIO
from paceline.models.resolve import served_name
from peers.page import ROOT
from peers.page_source import shown

Record = dict[str, Any]
RESULTS = ROOT / "docs" / "results" / "drafters.jsonl"
PAGE = ROOT / "docs" / "drafters.md"
SETS = ("mt_bench", "humaneval", "gsm8k", "code_edit", "spec_bench", "bfcl")  # sets that come with the package
FORMATS = ("auto", "int8")
SMOLLM2 = ("eagle:smollm2", "suffix", "ngram")
QWEN_ROUNDS = 1  # a model of ten times the size takes ten times as long
WITHOUT_TRAINING = ("recycling", "lookahead", "layers:auto")
SELF = "self:int4"  # has fewer bits than the target in int8 alone
TABLE = re.compile(r"(<!-- drafters: begin[^>]*-->\n).*(<!-- drafters: end -->)", flags=re.DOTALL)
HEADER = (
    "target", "format", "drafter", "set", "tokens/step", "accepted", "by position", "draft ms", "× plain", "same",
)  # fmt: skip  # a field a line would hide what belongs together


@dataclass(frozen=True, slots=True)
class Run:
    """One `bench offline`: drafters that share an engine."""

    target: str
    drafters: tuple[str, ...]  # as --drafter takes them
    format: str
    set: str
    portfolio: bool = False  # has a cell of its own
    rounds: int = 3  # turns of each way

    @property
    def cells(self) -> dict[str, str]:
        """The drafter of each cell, as a user names it, by the name that its record has."""
        names = {words: words.partition(":")[0] for words in self.drafters}
        beside = {PORTFOLIO: "portfolio"} if self.portfolio else {}
        return {name: words for words, name in names.items()} | beside

    def argv(self, args: argparse.Namespace) -> list[str]:
        drafters = [word for words in self.drafters for word in ("--drafter", words)]
        size = ["--count", str(args.count), "--max-tokens", str(args.max_tokens), "--rounds", str(self.rounds)]
        data = [] if args.data is None else ["--data", str(args.data)]
        what = [self.target, "--format", self.format, *drafters, "--prompts", self.set]
        return ["bench", "offline", *what, *size, *data, "--device", "cpu", "--json"]


def runs(args: argparse.Namespace) -> Iterator[Run]:
    """Yield all runs: those of each target on one set in one format, then of further sets and formats."""
    for format in FORMATS:
        for name in args.sets:
            yield from _of_smollm2(format, name)
            if args.qwen is not None:
                models = tuple(f"model:{each}" for each in (args.sibling, "smollm2") if each is not None)
                yield from _of_qwen(args.qwen, models, format, name)


def _of_smollm2(format: str, name: str) -> Iterator[Run]:
    yield Run("smollm2", SMOLLM2, format, name, portfolio=True)
    yield Run("smollm2", _without_training(format), format, name)


def _of_qwen(target: str, models: Sequence[str], format: str, name: str) -> Iterator[Run]:
    """Yield the runs of a target without a head: each model in a run of its own, since all have the same short name."""
    for words in models:
        yield Run(target, (words,), format, name, rounds=QWEN_ROUNDS)
    yield Run(target, ("suffix", "ngram", *_without_training(format)), format, name, rounds=QWEN_ROUNDS)


def _without_training(format: str) -> tuple[str, ...]:
    return (*WITHOUT_TRAINING, SELF) if format == "int8" else WITHOUT_TRAINING


def missing(wanted: Sequence[Run], known: Sequence[Record]) -> list[Run]:
    there = {(each["target"], each["format"], each["set"], each["drafter"]) for each in known}
    return [
        run
        for run in wanted
        if any((shown(run.target), run.format, run.set, shown(words)) not in there for words in run.cells.values())
    ]


def measure(run: Run, args: argparse.Namespace) -> list[Record]:
    """Run one benchmark; what it measured, a record for each drafter. Raises ValueError if it failed."""
    command = [sys.executable, "-m", "paceline.cli.main", *run.argv(args)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode:
        raise ValueError(f"status {done.returncode}")
    return records(run, json.loads(without_folders(done.stdout.splitlines()[-1], run)))


def without_folders(text: str, run: Run) -> str:
    """Replace the models' paths on this machine by their names: reasons not to draft have them, too."""
    for words in (run.target, *run.drafters):
        path = words.rpartition(":")[2]
        text = text.replace(path, served_name(path)) if "/" in path else text
    return text


def records(run: Run, found: Record) -> list[Record]:
    cells = {cell["drafter"]: cell for cell in found["cells"]}
    facts = {"target": shown(run.target), "format": run.format, "set": run.set}
    return [
        {**facts, "drafter": shown(words), "how": found["drafters"].get(name), "cell": cells[name]}
        for name, words in run.cells.items()
        if name in cells
    ]


def work(args: argparse.Namespace, *, measure: Callable[[Run, argparse.Namespace], list[Record]] = measure) -> int:
    """Measure what is missing, within the minutes, and return how many runs failed."""
    known = resume(args.save, setup(args), of="drafters")
    left, budget, failed = missing(list(runs(args)), known), Budget(args.minutes), 0
    for place, run in enumerate(left):
        if budget.spent:
            print(f"the {args.minutes:g} minutes are over: {len(left) - place} runs are left", file=sys.stderr)
            break
        print(f"{place + 1}/{len(left)}: paceline {shlex.join(run.argv(args))}", file=sys.stderr)
        try:
            for record in measure(run, args):
                append(args.save, record)
        except ValueError as error:
            failed += 1
            print(f"failed: {error}", file=sys.stderr)
    return failed


def setup(args: argparse.Namespace) -> Record:
    import torch

    machine = describe(torch.device("cpu"))
    return {"count": args.count, "max_tokens": args.max_tokens, "cpu": machine["cpu"]}


# ── the table ──


def page(text: str, cells: Sequence[Record]) -> str:
    """The page with a new table between its marks."""
    if not TABLE.search(text):
        raise SystemExit("the page has no `<!-- drafters: begin -->` and `<!-- drafters: end -->` to write between")
    return TABLE.sub(lambda found: found[1] + table(cells) + found[2], text)


def table(cells: Sequence[Record]) -> str:
    if not cells:
        return "No results are stored yet.\n"
    order = sorted(cells, key=lambda each: (each["target"], each["format"], each["drafter"], each["set"]))
    rows = [HEADER, tuple("---" for _ in HEADER), *map(row, order)]
    return "".join(f"| {' | '.join(fields)} |\n" for fields in rows)


def row(each: Mapping[str, Any]) -> tuple[str, ...]:
    cell = each["cell"]
    ratio = {"ratio": cell["ratio"], "interval": cell["ratio_interval"]}
    return (
        each["target"],
        each["format"],
        f"`{each['drafter']}`",
        each["set"],
        f"{cell['tokens_per_step']:.2f}",
        number(cell["acceptance"], ".0%"),
        " ".join(f"{share:.2f}" for share in cell["acceptance_by_position"][:4]),
        number(cell["speculative_ms_per_step"]["draft"], ".2f"),
        "" if cell["ratio"] is None else ratio_text(ratio),
        f"{cell['identical']}/{cell['prompts']}",
    )


def read(path: Path) -> list[Record]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines[1:]]


def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m peers.drafters", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--save", type=Path, default=RESULTS, help="file of the cells")
    parser.add_argument("--write", type=Path, default=PAGE, help="page whose table is written")
    parser.add_argument("--page", action="store_true", help="write the table, measure nothing")
    parser.add_argument("--list", action="store_true", help="show the commands that are left")
    parser.add_argument("--minutes", type=float, help="begin no run later")
    parser.add_argument("--qwen", metavar="GGUF", help="Qwen2.5-Coder-1.5B")
    parser.add_argument("--sibling", metavar="GGUF", help="Qwen2.5-Coder-0.5B")
    parser.add_argument("--sets", nargs="+", default=SETS, metavar="SET", help=f"(default: {' '.join(SETS)})")
    parser.add_argument("--data", type=Path, metavar="DIR", help="prompt sets that go before the shipped ones")
    parser.add_argument("--count", type=int, default=10, help="prompts of a cell (default: 10)")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer (default: 64)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = options(argv)
    if args.list:
        for run in missing(list(runs(args)), read(args.save)):
            print(f"paceline {shlex.join(run.argv(args))}")
        return 0
    if args.minutes is not None and args.minutes <= 0:
        raise SystemExit(f"--minutes must be above 0, not {args.minutes:g}")
    try:
        failed = 0 if args.page else work(args)
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on with {args.save}", file=sys.stderr)
        return 130
    text = args.write.read_text(encoding="utf-8")
    args.write.write_text(page(text, read(args.save)), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
