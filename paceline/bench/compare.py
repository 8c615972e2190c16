"""Compare two results of `bench serve`, `vllm bench serve` or `bench offline`: ratios, intervals, verdicts.

Runs are matched by arm, load and temperature, or by drafter, draft, batch and temperature. Latencies are paired by
prompt if both files name their prompts; otherwise they are compared as two samples. A throughput has an interval if
both files have it by block. The interval covers other prompts, not other changes of the machine between the two
measurements; arms that took turns in one run cancel those too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bench.conclusion import conclusion, of_ratio
from paceline.bench.serve_text import load_title, runs_of, table
from paceline.bench.statistics import Ratio, paired_ratio, unpaired_ratio
from paceline.errors import InvalidRequest

Record = dict[str, Any]
Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of one run in both files. The ratio is second / first."""

    run: str
    name: str
    first: float | None
    second: float | None
    ratio: Ratio
    more_is_better: bool

    @property
    def verdict(self) -> str:
        if self.ratio.verdict in ("unknown", "same"):
            return {"unknown": "no interval", "same": "no difference shown"}[self.ratio.verdict]
        return "better" if (self.ratio.verdict == "higher") == self.more_is_better else "worse"

    def worse_by(self, share: float) -> bool:
        """True if the whole interval is worse by more than this share; without an interval, if the ratio is."""
        low, high = self.ratio.low or self.ratio.value, self.ratio.high or self.ratio.value
        return high < 1 - share if self.more_is_better else low > 1 + share


def read(path: Path) -> Record:
    """Read a file of --save, or the output of a benchmark with --json, whose last line counts."""
    try:
        content = path.read_text(encoding="utf-8").strip()
        found = json.loads(content if content.startswith("{") else content.rpartition("\n")[2])
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path} holds no result of a benchmark ({error}): save one with --save") from error
    if not isinstance(found, dict):
        raise InvalidRequest(
            f"{path} holds a {type(found).__name__}, not a result of a benchmark: save one with --save"
        )
    return found


def compare(first: Record, second: Record) -> list[Compared]:
    kinds = [_kind(record) for record in (first, second)]
    if kinds[0] != kinds[1]:
        raise InvalidRequest(f"a result of `bench {kinds[0]}` and one of `bench {kinds[1]}` cannot be compared")
    parts = cells_by_key if kinds[0] == "offline" else runs_by_key
    mine, theirs = parts(first), parts(second)
    shared = [key for key in mine if key in theirs]
    if not shared:
        raise InvalidRequest(
            f"the files have no run in common: {_names(mine)} in the first, {_names(theirs)} in the second"
        )
    judge = _cells if kinds[0] == "offline" else _runs
    return [found for key in shared for found in judge(" ".join(key), mine[key], theirs[key])]


def _kind(record: Record) -> str:
    if record.get("benchmark") == "offline":
        return "offline"
    if "completed" in record or "runs" in record:
        return "serve"
    raise InvalidRequest("a file holds no result of `bench serve` or `bench offline`: save one with --save")


def _names(runs: dict[Key, Record]) -> str:
    return ", ".join(" ".join(key) for key in runs)


def runs_by_key(record: Record) -> dict[Key, Record]:
    runs = runs_of(record)
    if len(runs) == 1:
        return {("run",): runs[0]}  # matches whatever its arm and load are
    return {(load_title(run), f"T={run.get('temperature', 0):g}", str(run.get("arm", ""))): run for run in runs}


def cells_by_key(record: Record) -> dict[Key, Record]:
    return {
        (f"batch {c['batch']}", f"T={c['temperature']:g}", f"{c['drafter']}{_limit(c)}"): c for c in record["cells"]
    }


def _limit(cell: Record) -> str:
    return "" if cell["max_draft"] is None else f" ≤{cell['max_draft']}"


def _runs(title: str, first: Record, second: Record) -> list[Compared]:
    found = []
    speed = _speed(first, second)
    if speed is not None:
        found.append(Compared(title, "output_throughput", *_both(first, second, "output_throughput"), speed, True))
    for name, of in LATENCIES.items():
        ratio = _latency(first, second, of)
        if ratio is not None:
            found.append(Compared(title, f"mean_{name}_ms", *_both(first, second, f"mean_{name}_ms"), ratio, False))
    return found


def _both(first: Record, second: Record, name: str) -> tuple[float | None, float | None]:
    return first.get(name), second.get(name)


def _speed(first: Record, second: Record) -> Ratio | None:
    blocks = [
        list(zip(run.get("block_output_tokens", ()), run.get("block_seconds", ()), strict=False))
        for run in (second, first)
    ]
    if len(blocks[0]) == len(blocks[1]):
        ratio = paired_ratio(blocks[0], blocks[1])
        if ratio is not None:
            return ratio
    before, after = _both(first, second, "output_throughput")
    return Ratio(after / before, None, None, 1) if before and after else None


def _tpot(run: Record, i: int) -> float | None:
    tokens = run["output_lens"][i]
    return (run["latencies"][i] - run["ttfts"][i]) / (tokens - 1) if tokens > 1 else None


LATENCIES: dict[str, Callable[[Record, int], float | None]] = {
    "ttft": lambda run, i: float(run["ttfts"][i]),
    "tpot": _tpot,
    "e2el": lambda run, i: float(run["latencies"][i]),
}


def _latency(first: Record, second: Record, of: Callable[[Record, int], float | None]) -> Ratio | None:
    """Ratio of a latency; None if a file does not list its requests (`vllm bench serve --save-detailed` does)."""
    samples = []
    for run in (second, first):
        if not {"ttfts", "latencies", "output_lens"} <= run.keys():
            return None
        errors = run.get("errors") or [""] * len(run["ttfts"])
        names = run.get("prompt_ids") or range(len(errors))
        samples.append([(n, v) for i, n in enumerate(names) if not errors[i] and (v := of(run, i)) is not None])
    if "prompt_ids" in first and "prompt_ids" in second:
        mine, theirs = (_means(sample) for sample in samples)
        both = [name for name in mine if name in theirs]
        return paired_ratio([(mine[name], 1) for name in both], [(theirs[name], 1) for name in both])
    return unpaired_ratio([v for _, v in samples[0]], [v for _, v in samples[1]])


def _means(sample: Sequence[tuple[Any, float]]) -> dict[Any, float]:
    """Mean value by prompt."""
    by_name: dict[Any, list[float]] = {}
    for name, value in sample:
        by_name.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in by_name.items()}


def _cells(title: str, first: Record, second: Record) -> list[Compared]:
    found = []
    for arm in ("plain", "speculative"):
        units = [[tuple(unit) for unit in cell[f"unit_{arm}"]] for cell in (second, first)]
        ratio = paired_ratio(*units) if len(units[0]) == len(units[1]) else None
        before, after = _both(first, second, f"{arm}_tok_s")
        if before and after:
            whole = ratio or Ratio(after / before, None, None, 1)
            found.append(Compared(title, f"{arm}_tok_s", before, after, whole, True))
    return found


def text(found: Sequence[Compared]) -> str:
    rows = [("run", "", "first", "second", "ratio", "95 % interval", "verdict")]
    for each in found:
        ratio = each.ratio
        interval = "" if ratio.low is None else f"[{ratio.low:.3f}, {ratio.high:.3f}]"
        shown = ["" if value is None else f"{value:.2f}" for value in (each.first, each.second)]
        rows.append((each.run, each.name, shown[0], shown[1], f"{ratio.value:.3f}", interval, each.verdict))
    return f"{table(rows)}\n\n{compared_conclusion(found)}"


def compared_conclusion(found: Sequence[Compared]) -> str:
    """Conclude from the speeds of both files: tokens a second, of the speculative runs where there are such."""
    names = {each.name for each in found}
    speed = next((name for name in ("speculative_tok_s", "output_throughput") if name in names), "plain_tok_s")
    outcomes = [of_ratio(each.run, each.ratio.record()) for each in found if each.name == speed]
    return conclusion("The second result is", outcomes)


def record(found: Sequence[Compared]) -> list[Record]:
    return [
        {
            "run": each.run,
            "metric": each.name,
            "first": each.first,
            "second": each.second,
            **each.ratio.record(),
            "verdict": each.verdict,
        }
        for each in found
    ]
