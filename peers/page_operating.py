"""Parts of docs/benchmarks.md about operating: how right a tuning, a simulated replay and a canary were."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import NamedTuple

from paceline.tune.choice import Measured, choose
from peers.page_source import Paths, Record, load, shown, source, with_sources
from peers.tables import markdown

PLAIN = "plain"
MEASURED = 3  # ways that `paceline tune` measures at each batch size, by default


def tuned(paths: Paths) -> str:
    """Choices of `paceline tune` within a grid in which everything was measured: pairs of files, choice and grid.

    Both may be the same file: of a grid only what `tune` would have measured is chosen from."""
    header = ["prompts", "choice", "at 1 and 8", "best setting", "behind it", "best at 1 and at 8", "behind both"]
    header += ["right predictions", "seconds"]
    records = [load(path) for path in paths]
    rows = [_tuned_row(*pair) for pair in zip(records[::2], records[1::2], strict=True)]
    return with_sources(markdown(header, rows), dict.fromkeys(paths))


def _tuned_row(chosen: Record, grid: Record) -> list[str]:
    choice, batches = _chosen(chosen), grid["batch"]
    speeds = [_speed(grid, _at(choice, batch), batch) for batch in batches]
    best = [_best(grid, batch) for batch in batches]
    ways = ", ".join(f"{cell['way']} {cell['ratio']:.2f}" for cell in best)
    setting, fastest = _best_setting(grid)
    took, whole = chosen["seconds"], grid["seconds"]
    errors = grid["errors"]
    return [
        ", ".join(chosen["sources"]),
        choice.way,
        " and ".join(f"{speed:.2f}" for speed in speeds),
        f"{setting} {fastest:.2f}",
        _behind(mean(speeds), fastest),
        ways,
        _behind(mean(speeds), mean([cell["ratio"] for cell in best])),
        f"{errors['close']} of {errors['cells']}",
        f"{took['predictions']:.0f} to predict; the grid {whole['checks']:.0f}",
    ]


def advised(paths: Paths) -> str:
    """Pairs that `paceline tune --candidates` judged, by what it predicted for one sequence, and what was measured."""
    header = ["target", "prompts", "drafter", "predicted", "measured", "error"]
    records = [load(path) for path in paths]
    return with_sources(markdown(header, [row for record in records for row in _advised_rows(record)]), paths)


def _advised_rows(record: Record) -> list[list[str]]:
    measured = {cell["way"]: cell["ratio"] for cell in record["cells"] if cell["batch"] == 1}
    best: dict[str, Record] = {}
    for made in record["predictions"]:
        if made["batch"] == 1 and made["ratio"] > best.get(made["drafter"], {"ratio": 0.0})["ratio"]:
            best[made["drafter"]] = made
    where = [shown(record["target"]), ", ".join(record["sources"])]
    return [
        [
            *where,
            f"{shown(made['drafter'])}, drafts of {made['draft']}",
            f"{made['ratio']:.2f} [{made['interval'][0]:.2f}, {made['interval'][1]:.2f}]",
            f"{measured[made['way']]:.2f}",
            f"{made['ratio'] / measured[made['way']] - 1:+.1%}",
        ]
        for made in sorted(best.values(), key=lambda each: -float(each["ratio"]))
    ]


class Chosen(NamedTuple):
    way: str
    max_draft_batch: int | None


def _chosen(record: Record) -> Chosen:
    """Choose as `tune` does: among plain decoding, the default settings and the best by prediction at each batch size,
    by what was measured."""
    kept = [cell for cell in record["cells"] if cell["draft"] is None or _is_measured(record, cell)]
    names = [field.name for field in fields(Measured)]
    made = choose([Measured(**{name: cell[name] for name in names}) for cell in kept], [])
    assert made is not None, "without limits something is chosen"
    way = (made.group, made.drafter, made.draft)
    [title] = {cell["way"] for cell in kept if (cell["group"], cell["drafter"], cell["draft"]) == way}
    return Chosen(title, made.max_draft_batch)


def _is_measured(record: Record, cell: Record) -> bool:
    """Return whether a way is among the best by prediction, which `tune` measures."""
    mine = sorted((p for p in record["predictions"] if p["batch"] == cell["batch"]), key=lambda each: -each["ratio"])
    return (cell["drafter"], cell["draft"]) in [(p["drafter"], p["draft"]) for p in mine[:MEASURED]]


def _at(choice: Chosen, batch: int) -> str:
    """Return how a choice decodes so many sequences."""
    return PLAIN if choice.max_draft_batch is not None and batch > choice.max_draft_batch else choice.way


def _speed(grid: Record, way: str, batch: int) -> float:
    [cell] = [cell for cell in grid["cells"] if (cell["batch"], cell["way"]) == (batch, way)]
    return float(cell["ratio"])


def _best(grid: Record, batch: int) -> Record:
    cells: list[Record] = [cell for cell in grid["cells"] if cell["batch"] == batch]
    return max(cells, key=lambda cell: float(cell["ratio"]))


def _best_setting(grid: Record) -> tuple[str, float]:
    """Return the way that is the fastest over all batch sizes, as a server has one setting, and its mean. Batches above
    the smallest may run plain, by `max_draft_batch`."""
    first, *others = grid["batch"]
    known = {(cell["way"], cell["batch"]): cell["ratio"] for cell in grid["cells"]}
    means = {
        way: mean([known[way, first], *(max(1.0, known.get((way, batch), 0.0)) for batch in others)])
        for way, batch in known
        if batch == first
    }
    best = max(means, key=means.__getitem__)
    return best, means[best]


def _behind(speed: float, best: float) -> str:
    return f"{max(0.0, 1 - speed / best):.1%}"


def mean(ratios: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


def canary_trials(paths: Paths) -> str:
    """Trials of the canary, a row for each kind of drafter."""
    [path] = paths
    record = load(path)
    header = ["drafter", "trials", "promoted", "rolled back", "still open", "requests", "texts changed", "lost"]
    kinds = dict.fromkeys(row["kind"] for row in record["trials"])
    rows = [_trials_row(kind, [row for row in record["trials"] if row["kind"] == kind]) for kind in kinds]
    return "\n".join([markdown(header, rows), "", source(path, record)])


def _trials_row(kind: str, trials: Sequence[Record]) -> list[str]:
    phases = [row["canary"]["phase"] for row in trials]
    ended = ["promoted", "rolled back"]
    counts = [phases.count(phase) for phase in ended]
    needed = sorted(row["requests"] for row in trials)
    return [
        kind,
        str(len(trials)),
        *map(str, counts),
        str(len(trials) - sum(counts)),
        f"{needed[0]}–{needed[-1]}, median {statistics.median(needed):g}",
        str(sum(row["changed"] for row in trials)),
        str(sum(row["lost"] for row in trials)),
    ]


def replayed(paths: Paths) -> str:
    """A simulated replay beside a real one of the same record."""
    [path] = paths
    record = load(path)
    header = ["figure", "simulated", "for real", "error"]
    rows = [
        [each["figure"], f"{each['simulated']:.1f}", f"{each['real']:.1f}", f"{each['error']:+.1%}"]
        for each in record["errors_against"]
    ]
    return "\n".join([markdown(header, rows), "", source(path, record)])


OPERATING_PARTS: Mapping[str, Callable[[Paths], str]] = {
    "tuned": tuned,
    "advised": advised,
    "canary": canary_trials,
    "replayed": replayed,
}
