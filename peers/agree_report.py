"""A table of the figures of two load tools on the same servers: medians over rounds, and ratios within a round."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from peers.tables import markdown

Record = dict[str, Any]
METRICS = {  # key of both tools → name, digits
    "output_throughput": ("tokens/s", 1),
    "request_throughput": ("requests/s", 3),
    "median_ttft_ms": ("TTFT ms, median", 1),
    "mean_tpot_ms": ("TPOT ms, mean", 2),
    "median_tpot_ms": ("TPOT ms, median", 2),
    "mean_itl_ms": ("ITL ms, mean", 2),
    "median_itl_ms": ("ITL ms, median", 2),
}
OURS, THEIRS = "paceline bench serve", "vllm bench serve"


def text(record: Record) -> str:
    """The table. `record["rounds"]` has the figures of each tool by round and server."""
    header = ["server", "", OURS, THEIRS, "ratio within a round"]
    rows = []
    for server in dict.fromkeys(found["server"] for found in record["rounds"]):
        mine = [found for found in record["rounds"] if found["server"] == server]
        rows += [[server, *_row(mine, metric)] for metric in METRICS]
    return markdown(header, rows)


def _row(rounds: Sequence[Record], metric: str) -> list[str]:
    name, digits = METRICS[metric]
    ours, theirs = ([found[tool][metric] for found in rounds] for tool in (OURS, THEIRS))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return [name, _median(ours, digits), _median(theirs, digits), _median(ratios, 3)]


def _median(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def kept(result: Mapping[str, Any]) -> Record:
    """The figures of a tool's result that are compared, and its counts."""
    return {key: result[key] for key in (*METRICS, "completed", "total_output_tokens", "duration")}
