"""Results of a grid: each cell beside plain decoding and beside its best fixed setting, and verdicts over all cells.

Ratios are those of tokens per second in one round. A cell has their median, and an interval of their geometric mean
that is corrected for the number of cells in the whole grid (Bonferroni), measured or not. A fixed setting is chosen on
the even rounds and compared on the odd ones, so that luck in the choice does not count for it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.audit.degeneration import void
from paceline.bench.grid import DEFAULT, PLAIN, Place
from paceline.bench.serve_text import number, table
from paceline.bench.statistics import geometric_ratio

Record = dict[str, Any]
MIN_RATIO = 0.98  # of plain: what a cell may lose to noise and to measuring
MIN_RATIO_TO_BEST = 0.97  # of the best fixed setting of the cell
MAX_SHOWN = 6  # names of cells in a line about those left out
DEFINITION = (
    "ratio: default by plain in tokens a second after every request of a batch has its first, median of the rounds; "
    "interval: 95 % for all {count} cells of the grid together (Bonferroni); best fixed: chosen on the even rounds, "
    "compared on the odd ones"
)


def record(
    measured: Sequence[Record], places: Sequence[Place], skipped: Sequence[tuple[str, str]], facts: Mapping[str, Any]
) -> Record:
    """The record of a grid. `places`: all of it; `skipped`: names of cells that were left out, with reasons."""
    cells = [cell for each in measured if (cell := cell_record(each, comparisons=len(places))) is not None]
    empty = [(_name(each), "answers too short to be timed") for each in measured if not timed_rounds(each)]
    cells.sort(key=lambda cell: float(cell["ratio"]))
    found = {
        "benchmark": "grid",
        "definition": DEFINITION.format(count=len(places)),
        **facts,
        "grid": len(places),
        "cells": cells,
        "skipped": [{"cell": name, "why": why} for name, why in [*skipped, *empty]],
        "single": _single(measured),
    }
    return found | {"verdicts": verdicts(found)}


def cell_record(measured: Record, *, comparisons: int) -> Record | None:
    """Summarise one cell; None if no round could be timed."""
    rounds = timed_rounds(measured)
    if not rounds:
        return None
    whole = geometric_ratio(_ratios(measured, DEFAULT, PLAIN, rounds), comparisons=comparisons)
    assert whole is not None, "there are rounds"
    default = measured["arms"][DEFAULT]
    return {
        "kind": measured["kind"],
        "batch": measured["batch"],
        "temperature": measured["temperature"],
        "rounds": len(rounds),
        "plain_tok_s": _speed(measured, PLAIN, rounds),
        "default_tok_s": _speed(measured, DEFAULT, rounds),
        "ratio": statistics.median(_ratios(measured, DEFAULT, PLAIN, rounds)),
        "interval": None if whole.low is None else [whole.low, whole.high],
        "tokens_per_step": default["tokens_per_step"],
        "best": _best(measured, rounds, comparisons=comparisons),
        "identical": measured["identical"],
        "answers": measured["answers"],
        "claim_is_void": void(measured["answers"], measured["degenerate"]),
    }


def _best(measured: Record, rounds: Sequence[int], *, comparisons: int) -> Record | None:
    """Choose the best fixed setting on the even rounds, and compare the default with it on the odd ones."""
    choosing, comparing = rounds[::2], rounds[1::2]
    fixed = [title for title in measured["arms"] if title not in (PLAIN, DEFAULT)]
    if not fixed or not comparing:
        return None
    best = max(fixed, key=lambda title: _mean_log(measured, title, PLAIN, choosing))
    ratios = _ratios(measured, DEFAULT, best, comparing)
    whole = geometric_ratio(ratios, comparisons=comparisons)
    interval = None if whole is None or whole.low is None else [whole.low, whole.high]
    return {"title": best, "ratio": statistics.median(ratios), "interval": interval}


def _single(measured: Sequence[Record]) -> Record | None:
    """The best single fixed setting for all cells, by the even rounds, and the geometric mean of the default over it,
    by the odd ones."""
    timed = [(each, rounds) for each in measured if len(rounds := timed_rounds(each)) > 1]
    titles = [set(each["arms"]) - {PLAIN, DEFAULT} for each, _ in timed]
    common = sorted(set.intersection(*titles)) if titles else []
    if not common:
        return None
    means = {
        title: statistics.fmean(_mean_log(each, title, PLAIN, rounds[::2]) for each, rounds in timed)
        for title in common
    }
    best = max(common, key=means.__getitem__)
    over = statistics.fmean(_mean_log(each, DEFAULT, best, rounds[1::2]) for each, rounds in timed)
    return {"title": best, "ratio": math.exp(over), "cells": len(timed)}


def timed_rounds(measured: Record) -> list[int]:
    """Return the rounds in which every arm decoded something behind its first tokens."""
    arms = measured["arms"].values()
    count = len(measured["arms"][PLAIN]["tokens"])
    return [i for i in range(count) if all(arm["tokens"][i] > 0 and arm["seconds"][i] > 0 for arm in arms)]


def _ratios(measured: Record, mine: str, other: str, rounds: Sequence[int]) -> list[float]:
    a, b = measured["arms"][mine], measured["arms"][other]
    return [(a["tokens"][i] / a["seconds"][i]) / (b["tokens"][i] / b["seconds"][i]) for i in rounds]


def _mean_log(measured: Record, mine: str, other: str, rounds: Sequence[int]) -> float:
    return statistics.fmean(map(math.log, _ratios(measured, mine, other, rounds)))


def _speed(measured: Record, title: str, rounds: Sequence[int]) -> float:
    arm = measured["arms"][title]
    return float(statistics.median(arm["tokens"][i] / arm["seconds"][i] for i in rounds))


def _name(cell: Record) -> str:
    return f"{cell['kind']}, batch {cell['batch']}, T={cell['temperature']:g}"


def verdicts(found: Record) -> list[str]:
    """Say in sentences what the grid shows."""
    cells = found["cells"]
    if not cells:
        return ["Nothing was measured."]
    said = [_about_intervals(cells), _about_medians(cells)]
    compared = [cell for cell in cells if cell["best"] is not None]
    if compared:
        near = sum(cell["best"]["ratio"] >= MIN_RATIO_TO_BEST for cell in compared)
        least = f"at least {MIN_RATIO_TO_BEST:g} of the best fixed setting of the cell"
        said.append(f"{near} of {len(compared)} medians are {least}.")
    single = found["single"]
    if single is not None:
        said.append(
            f"Geometric mean {single['ratio']:.3f} of the best single fixed setting, {single['title']}, "
            f"over {single['cells']} cells."
        )
    different = sum(cell["answers"] - cell["identical"] for cell in cells)
    said.append(f"{different} of {sum(cell['answers'] for cell in cells)} answers differ from plain ones.")
    if any(cell["claim_is_void"] for cell in cells):
        voids = sum(cell["claim_is_void"] for cell in cells)
        said.append(f"In {voids} cells many plain answers loop or repeat themselves: a gain there is no claim.")
    if len(cells) < found["grid"]:
        said.append(f"{found['grid'] - len(cells)} of {found['grid']} cells of the grid are not measured.")
    return said


def _about_intervals(cells: Sequence[Record]) -> str:
    below = [_name(cell) for cell in cells if cell["interval"] is not None and cell["interval"][1] < MIN_RATIO]
    unknown = sum(cell["interval"] is None for cell in cells)
    more = f" ({unknown} have none, by too few rounds)" if unknown else ""
    if not below:
        return f"No cell's interval lies below {MIN_RATIO:g} of plain{more}."
    return (
        f"The intervals of {len(below)} of {len(cells)} cells lie below {MIN_RATIO:g} of plain{more}: {_listed(below)}."
    )


def _about_medians(cells: Sequence[Record]) -> str:
    below = sum(cell["ratio"] < MIN_RATIO for cell in cells)
    return f"{below} of {len(cells)} medians ({below / len(cells):.0%}) are below {MIN_RATIO:g} of plain."


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MAX_SHOWN
    return "; ".join(names[:MAX_SHOWN]) + (f"; and {more} more" if more > 0 else "")


HEADER = ("kind", "batch", "T", "plain tok/s", "default tok/s", "ratio", "tokens/step", "best fixed", "ratio to it", "")


def text(found: Record) -> str:
    machine = found["machine"]
    facts = f"{machine.get('gpu') or machine['cpu']} · paceline {machine['paceline']} ({machine['commit']})"
    parts = [f"{found['target']} · {facts}", table([HEADER, *map(row, found["cells"])]), found["definition"]]
    by_reason: dict[str, list[str]] = {}
    for each in found["skipped"]:
        by_reason.setdefault(each["why"], []).append(each["cell"])
    parts += [f"Left out, {why}: {len(names)} cells: {_listed(names)}." for why, names in by_reason.items()]
    return "\n\n".join([*parts, "\n".join(found["verdicts"])])


def row(cell: Record) -> tuple[str, ...]:
    best = cell["best"] or {"title": "", "ratio": None, "interval": None}
    return (
        cell["kind"],
        str(cell["batch"]),
        f"{cell['temperature']:g}",
        number(cell["plain_tok_s"], ".1f"),
        number(cell["default_tok_s"], ".1f"),
        _with_interval(cell["ratio"], cell["interval"]),
        f"{cell['tokens_per_step']:.2f}",
        best["title"],
        _with_interval(best["ratio"], best["interval"]),
        "loops" if cell["claim_is_void"] else "",
    )


def _with_interval(ratio: float | None, interval: Sequence[float] | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio:.3f}" if interval is None else f"{ratio:.3f} ({interval[0]:.2f} to {interval[1]:.2f})"
