"""Charts of a record: speed, latency, acceptance by position and category, tokens per step, the load curve.

A chart without data is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.bench.plots import Chart, Series
from paceline.bench.serve_text import load_title, runs_of

Record = dict[str, Any]
SPEEDS = {"output_throughput": ("speed", "Tokens a second", "tok/s")}
TIMES = {
    "ttft": ("ttft", "Time to first token, median", "ms"),
    "tpot": ("tpot", "Time per output token, median", "ms"),
    "e2el": ("e2e", "Whole answer, median", "ms"),
}


def charts(record: Record) -> list[Chart]:
    found = _offline(record["cells"]) if record.get("benchmark") == "offline" else _serve(runs_of(record))
    return [chart for chart in found if chart.series and any(any(y is not None for y in s.ys) for s in chart.series)]


def _serve(runs: Sequence[Record]) -> list[Chart]:
    acceptance = {_title(r): r.get("spec_decode_per_position_acceptance_rates") or [] for r in runs}
    sizes = {_title(r): r.get("tokens_per_chunk_counts") or {} for r in runs}
    by_category = {_title(r): {n: c.get("acceptance_rate") for n, c in r.get("categories", {}).items()} for r in runs}
    return [
        *(_by_arm(runs, key, *words) for key, words in SPEEDS.items()),
        *(_by_arm(runs, f"median_{key}_ms", *words) for key, words in TIMES.items()),
        _curve(runs),
        _positions(acceptance, scale=100),
        _categories("category", "Acceptance by category", "%", by_category),
        _distribution("chunks", "Tokens of a chunk", sizes),
    ]


def _offline(cells: Sequence[Record]) -> list[Chart]:
    names = [_cell(cell) for cell in cells]
    by_category = {_cell(c): {n: _percent(k["acceptance"]) for n, k in c["categories"].items()} for c in cells}
    speeds = {_cell(c): {n: k.get("ratio") for n, k in c["categories"].items()} for c in cells}
    bounds = [tuple(c["ratio_interval"]) if c["ratio_interval"] else None for c in cells]
    arms = {"plain": "plain_tok_s", "speculative": "speculative_tok_s"}
    return [
        Chart(
            "speed", "Tokens a second", "tok/s", [_column(name, cells, key) for name, key in arms.items()], names=names
        ),
        Chart(
            "ratio",
            "Speculative by plain, with 95 % intervals",
            "×",
            [Series("ratio", [c["ratio"] for c in cells], bounds=bounds)],
            names=names,
        ),
        _categories("ratio-category", "Speculative by plain, by category", "×", speeds),
        _positions({_cell(c): c["acceptance_by_position"] for c in cells}, scale=100),
        _categories("category", "Acceptance by category", "%", by_category),
        _distribution("rounds", "Tokens of a step", {_cell(c): _step_sizes(c) for c in cells}),
        _parts(cells),
    ]


def _step_sizes(cell: Record) -> Mapping[str, int]:
    """Number of steps by tokens; older files call it tokens_per_round_counts."""
    sizes: Mapping[str, int] = cell.get("tokens_per_step_counts") or cell["tokens_per_round_counts"]
    return sizes


def _column(name: str, cells: Sequence[Record], key: str) -> Series:
    return Series(name, [cell[key] for cell in cells])


def _title(run: Record) -> str:
    return " ".join(part for part in (_place(run), str(run.get("arm", ""))) if part)


def _place(run: Record) -> str:
    return f"{load_title(run)} T={run.get('temperature', 0):g}"


def _cell(cell: Record) -> str:
    limit = "" if cell["max_draft"] is None else f" ≤{cell['max_draft']}"
    return f"{cell['drafter']}{limit} b{cell['batch']} T={cell['temperature']:g}"


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _by_arm(runs: Sequence[Record], key: str, file: str, title: str, unit: str) -> Chart:
    """Bars of one figure: a group for each load and temperature, a bar for each arm."""
    places = list(dict.fromkeys(_place(run) for run in runs))
    arms = list(dict.fromkeys(str(run.get("arm", "")) for run in runs))
    values = {(str(run.get("arm", "")), _place(run)): run.get(key) for run in runs}
    series = [Series(arm or "all", [values.get((arm, place)) for place in places]) for arm in arms]
    return Chart(file, title, unit, series, names=places)


def _curve(runs: Sequence[Record]) -> Chart:
    """Throughput against latency as the load grows, for arms that were measured under several loads."""
    lines: dict[str, list[Record]] = {}
    for run in runs:
        lines.setdefault(f"{run.get('arm', '')} T={run.get('temperature', 0):g}".strip(), []).append(run)
    series = [
        Series(name, [r.get("median_tpot_ms") for r in mine], xs=[r["output_throughput"] for r in mine])
        for name, mine in lines.items()
        if len(mine) > 1
    ]
    return Chart("curve", "Throughput and latency over the load", "TPOT ms", series, kind="lines", x="tokens a second")


def _positions(rates: Mapping[str, Sequence[float]], *, scale: float) -> Chart:
    series = [
        Series(name, [scale * rate for rate in mine], xs=list(range(1, len(mine) + 1)))
        for name, mine in rates.items()
        if mine
    ]
    return Chart(
        "positions", "Acceptance by position in the draft", "% of rounds", series, kind="lines", x="drafted token"
    )


def _categories(file: str, title: str, unit: str, found: Mapping[str, Mapping[str, float | None]]) -> Chart:
    names = sorted({name for mine in found.values() for name in mine})
    series = [
        Series(title, [mine.get(name) for name in names])
        for title, mine in found.items()
        if any(value is not None for value in mine.values())
    ]
    return Chart(file, title, unit, series, names=names)


def _distribution(file: str, title: str, counts: Mapping[str, Mapping[str, int]]) -> Chart:
    sizes = [str(n) for n in sorted({int(size) for mine in counts.values() for size in mine})]
    series = [
        Series(name, [100 * mine.get(size, 0) / sum(mine.values()) for size in sizes])
        for name, mine in counts.items()
        if mine
    ]
    return Chart(file, title, "%", series, names=sizes, x="tokens")


def _parts(cells: Sequence[Record]) -> Chart:
    parts = list(cells[0]["speculative_ms_per_step"])
    series = [Series(_cell(c), [c["speculative_ms_per_step"][part] for part in parts]) for c in cells]
    plain = {(c["batch"], c["temperature"]): c for c in cells}
    series += [
        Series(f"plain b{batch} T={temperature:g}", [c["plain_ms_per_step"][part] for part in parts])
        for (batch, temperature), c in plain.items()
    ]
    return Chart("parts", "Time of a step, by part", "ms", series, names=parts)
