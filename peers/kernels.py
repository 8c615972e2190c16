"""Times of one forward pass, by rows and by format of the weights, without an engine.

    python -m peers.kernels [--model smollm2] [--formats auto int8 int4] [--rows 1 2 4 5 8 12 16] [--json]

"decode" rows belong to as many sequences, each with its own context; "verify" rows to one sequence. All cells of the
table are measured in turns, so that noise of the machine affects all alike. The table has medians, and their ratio to
one row. One thread shows the cost of arithmetic, two or more that of memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace

import torch
from torch import Tensor

from paceline.bench.machine import describe
from paceline.kernels.base import PAGE_SIZE, Batch
from paceline.kernels.cpu.pool import default_threads
from paceline.models.load import load_model
from paceline.runner.forwards.compiled import CompiledForward

Cell = tuple[str, str, int]  # format, kind, rows


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Table:
    """Sequences of `context` tokens in their own pages, and batches that continue them."""

    def __init__(self, *, sequences: int, context: int, longest: int, vocab: int) -> None:
        self.context = context
        self.vocab = vocab
        self.sequences = sequences
        self.width = -(-(context + longest) // PAGE_SIZE)
        self.num_pages = sequences * self.width

    def rows(self, spans: list[tuple[int, int, int]]) -> Batch:
        """A batch over spans (sequence, start, stop), with logits of every row."""
        positions = [p for _, start, stop in spans for p in range(start, stop)]
        owners = [sequence for sequence, start, stop in spans for _ in range(start, stop)]
        starts = [0]
        for _, start, stop in spans:
            starts.append(starts[-1] + stop - start)
        pages = [[sequence * self.width + i for i in range(self.width)] for sequence, _, _ in spans]
        return Batch(
            tokens=ints([(7919 * p + 31 * owner) % self.vocab for p, owner in zip(positions, owners, strict=True)]),
            positions=ints(positions),
            slots=ints([o * self.width * PAGE_SIZE + p for p, o in zip(positions, owners, strict=True)]),
            row_starts=ints(starts),
            bases=ints([stop for _, _, stop in spans]),
            page_table=torch.tensor(pages, dtype=torch.int32),
            logit_rows=ints(list(range(len(positions)))),
        )

    def decode(self, rows: int) -> Batch:
        return self.rows([(sequence, self.context, self.context + 1) for sequence in range(rows)])

    def verify(self, rows: int) -> Batch:
        return self.rows([(0, self.context, self.context + rows)])

    def prefill(self, forward: CompiledForward) -> None:
        for sequence in range(self.sequences):
            batch = self.rows([(sequence, 0, self.context)])
            forward(replace(batch, logit_rows=ints([self.context - 1])))


def measure(options: argparse.Namespace) -> dict[Cell, list[float]]:
    forwards: dict[str, CompiledForward] = {}
    for format in options.formats:
        model = load_model(options.model, format=format)
        table = Table(
            sequences=max(options.rows),
            context=options.context,
            longest=max(options.rows),
            vocab=model.config.vocab_size,
        )
        forwards[format] = CompiledForward(
            model.config, model.weights, num_pages=table.num_pages, threads=options.threads
        )
        table.prefill(forwards[format])
    passes = {("decode", rows): table.decode(rows) for rows in options.rows}
    passes |= {("verify", rows): table.verify(rows) for rows in options.rows if rows > 1}
    times: dict[Cell, list[float]] = {}
    for _ in range(options.repeat):
        for format, forward in forwards.items():
            for (kind, rows), batch in passes.items():
                start = time.perf_counter()
                forward(batch)
                times.setdefault((format, kind, rows), []).append(time.perf_counter() - start)
    return times


def report(times: dict[Cell, list[float]]) -> list[dict[str, object]]:
    lines = []
    for (format, kind, rows), seconds in times.items():
        one = statistics.median(times[format, "decode", min(r for _, _, r in times)])
        middle = statistics.median(seconds)
        lines.append(
            {
                "format": format,
                "kind": kind,
                "rows": rows,
                "median_ms": round(middle * 1e3, 3),
                "best_ms": round(min(seconds) * 1e3, 3),
                "times_one_row": round(middle / one, 2),
            }
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--formats", nargs="+", default=["auto", "int8", "int4"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 5, 8, 12, 16])
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=40)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    options = parser.parse_args()
    lines = report(measure(options))
    if options.json:
        print(json.dumps({"machine": describe(torch.device("cpu")), "threads": options.threads, "passes": lines}))
        return
    print(" ".join(f"{name:>10}" for name in ("format", "kind", "rows", "median ms", "best ms", "× one row")))
    for line in lines:
        cells = (f"{value:>10}" for value in line.values())
        print(" ".join(cells))


if __name__ == "__main__":
    main()
