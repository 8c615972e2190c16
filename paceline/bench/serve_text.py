"""The record of `bench serve` as tables for people: a row for each run, and ratios of the arms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.bench.statistics import MIN_UNITS

Record = dict[str, Any]
MAX_ERROR_KINDS = 5  # most frequent errors shown per run
HEADER = (
    "load", "T", "arm", "done", "tok/s", "req/s", "good/s", "TTFT ms", "p99", "TPOT ms", "p99", "ITL ms", "p99",
    "E2E ms", "p99", "tok/chunk", "accepted", "tokens/round",
)  # fmt: skip  # a field a line would hide what belongs together
FIGURE_NAMES = {
    "output_throughput": "tokens a second",
    "mean_ttft_ms": "time to first token",
    "mean_tpot_ms": "time per output token",
    "mean_e2el_ms": "whole answer",
}


def runs_of(record: Record) -> list[Record]:
    """Runs of a record; a record without `runs` is a single run, as `vllm bench serve` writes it."""
    return list(record.get("runs") or [record])


def text(record: Record) -> str:
    runs = runs_of(record)
    rows = [HEADER, *map(run_row, runs)]
    parts = [table(rows), record["definition"]]
    if any(run.get("tokens_counted_by") == "chunks" for run in runs):
        parts.append("The server does not count tokens: every chunk with text counts as one, so speeds may be too low.")
    pairs = record.get("comparisons", ())
    parts += ["\n".join(map(compared_line, pairs))] if pairs else []
    if any(ratio["interval"] is None for pair in pairs for ratio in pair["ratios"].values()):
        parts.append(
            f"An interval needs {MIN_UNITS} blocks, of two requests or more for each at once: raise --count or "
            "--rounds."
        )
    parts += [line for run in runs for line in failures(run)]
    parts += [record["conclusion"]]
    return "\n\n".join(parts)


def load_title(run: Record) -> str:
    if "load" in run:
        return str(run["load"])
    rate = run.get("request_rate")
    shown = "" if rate in (None, "inf") else f"{rate:g}/s"
    if run.get("last_request_rate"):
        shown = f"{rate:g}–{run['last_request_rate']:g}/s"
    at_once = f"c{run['max_concurrency']}" if run.get("max_concurrency") else ""
    return " ".join(part for part in (shown, at_once) if part) or "all at once"


def run_row(run: Record) -> tuple[str, ...]:
    asked = run["completed"] + run.get("failed", 0) + run.get("not_sent", 0)
    latencies = [
        number(run.get(f"{which}_{latency}_ms"), ".1f")
        for latency in ("ttft", "tpot", "itl", "e2el")
        for which in ("median", "p99")
    ]
    rate = run.get("spec_decode_acceptance_rate")
    return (
        load_title(run),
        number(run.get("temperature"), "g"),
        str(run.get("arm", "")),
        f"{run['completed']}/{asked}",
        number(run["output_throughput"], ".1f"),
        number(run["request_throughput"], ".2f"),
        number(run.get("request_goodput"), ".2f"),
        *latencies,
        number(run.get("tokens_per_chunk"), ".2f"),
        "" if rate is None else f"{rate:.0f}%",
        number(run.get("spec_decode_acceptance_length"), ".2f"),
    )


def compared_line(found: Record) -> str:
    said = [f"{FIGURE_NAMES[name]} × {ratio_text(ratio)}" for name, ratio in found["ratios"].items()]
    return (
        f"{load_title(found)} T={found['temperature']:g}, {found['arm']} against {found['against']}: "
        f"{'; '.join(said) or 'nothing to compare'}; {found['identical_texts']} of {found['pairs']} texts the same"
    )


def ratio_text(ratio: Record) -> str:
    if ratio["interval"] is None:
        return f"{ratio['ratio']:.3f} (no interval)"
    low, high = ratio["interval"]
    return f"{ratio['ratio']:.3f} [{low:.3f}, {high:.3f}]"


def failures(run: Record) -> list[str]:
    """Lines about failed requests, the most frequent errors first."""
    errors = [error for error in run.get("errors", ()) if error]
    kinds = sorted({error: errors.count(error) for error in errors}.items(), key=lambda kind: -kind[1])
    lines = [f"{load_title(run)} {run.get('arm', '')}: {count} × {error}" for error, count in kinds[:MAX_ERROR_KINDS]]
    if run.get("not_sent"):
        lines.append(f"{load_title(run)} {run.get('arm', '')}: the server went away; {run['not_sent']} never sent")
    return lines


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)
