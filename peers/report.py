"""From single measurements to tables: medians over rounds, and ratios of runs that lay next to each other in time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from peers.book import Book, Run

BUSY = 0.1  # of a core, used by other processes


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens a second: the median over rounds, the slowest and the fastest."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.1f} ({self.low:.1f}–{self.high:.1f})"


def speed(runs: Sequence[Run]) -> Speed:
    found = [run.speed for run in runs]
    return Speed(statistics.median(found), min(found), max(found))


def mine(book: Book, mode: str, *, name: str, at_once: int) -> list[Run]:
    return [run for run in book.runs if run.mode == mode and run.set == name and run.at_once == at_once]


def same(book: Book, mode: str, *, at_once: int | None = None) -> str:
    """How many answers of a drafting mode equal those of its own plain one. Empty for a plain mode."""
    plain = book.about["modes"][mode]["plain"]
    if plain is None:
        return ""
    theirs = {(run.cell, id): d for run in book.runs if run.mode == plain for id, d in _digests(run)}
    pairs = [
        (digest, theirs[run.cell, id])
        for run in book.runs
        if run.mode == mode and at_once in (None, run.at_once)
        for id, digest in _digests(run)
        if (run.cell, id) in theirs
    ]
    return f"{sum(a == b for a, b in pairs)}/{len(pairs)}" if pairs else ""


def _digests(run: Run) -> list[tuple[str, str]]:
    return list(zip(run.prompts, run.digests, strict=True))


def whole_table(book: Book, *, at_once: int) -> str:
    """Every mode on every set."""
    sets = book.about["plan"]["sets"]
    rows = []
    for mode in book.about["modes"]:
        cells = [_cell(mine(book, mode, name=name, at_once=at_once)) for name in sets]
        if any(cells):
            rows.append([mode, *cells, same(book, mode, at_once=at_once)])
    return markdown(["system, mode", *sets, "same as own plain"], rows)


def _cell(runs: Sequence[Run]) -> str:
    return str(speed(runs)) if runs else ""


def best_table(book: Book) -> str:
    """Of each system the best mode, by set and prompts at once; Paceline's plain beside it."""
    plan = book.about["plan"]
    columns = [(name, int(at_once)) for at_once in plan["counts"] for name in plan["sets"]]
    systems = {mode: about["system"] for mode, about in book.about["modes"].items()}
    rows = []
    for system in dict.fromkeys(systems.values()):
        modes = [mode for mode, name in systems.items() if name == system]
        rows.append([system, *(_best(book, modes, name=n, at_once=k) for n, k in columns), _same_of_all(book, modes)])
    head = [f"{name}, {at_once} at once" if at_once > 1 else name for name, at_once in columns]
    return markdown(["tokens/s, best mode", *head, "same text"], [row for row in rows if any(row[1:])])


def _best(book: Book, modes: Sequence[str], *, name: str, at_once: int) -> str:
    medians = [speed(runs).median for mode in modes if (runs := mine(book, mode, name=name, at_once=at_once))]
    return f"{max(medians):.0f}" if medians else ""


def _same_of_all(book: Book, modes: Sequence[str]) -> str:
    found = [text.split("/") for mode in modes if (text := same(book, mode))]
    return f"{sum(int(a) for a, _ in found)}/{sum(int(b) for _, b in found)}" if found else ""


def best_ratios(book: Book) -> str:
    """Paceline's default against each set's best peer: the median over rounds of the ratio within a round."""
    plan = book.about["plan"]
    rows = []
    for at_once in map(int, plan["counts"]):
        for name in plan["sets"]:
            row = _against_best(book, name=name, at_once=at_once)
            rows += [[name, str(at_once), *row]] if row else []
    return markdown(["set", "at once", "Paceline's best", "peers' best", "ratio (lowest–highest round)"], rows)


def _against_best(book: Book, *, name: str, at_once: int) -> list[str]:
    medians = {
        mode: speed(runs).median
        for mode in book.about["modes"]
        if (runs := mine(book, mode, name=name, at_once=at_once))
    }
    own = {mode: median for mode, median in medians.items() if not book.about["modes"][mode]["is_peer"]}
    peers = {mode: median for mode, median in medians.items() if mode not in own}
    if not own or not peers:
        return []
    ours, theirs = (max(found, key=found.__getitem__) for found in (own, peers))
    return [ours, theirs, _paired(book, ours, theirs, name=name, at_once=at_once)]


def _paired(book: Book, ours: str, theirs: str, *, name: str, at_once: int) -> str:
    other = {run.round: run.speed for run in mine(book, theirs, name=name, at_once=at_once)}
    ratios = [
        run.speed / other[run.round] for run in mine(book, ours, name=name, at_once=at_once) if run.round in other
    ]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})" if ratios else ""


def disturbed(book: Book) -> list[str]:
    """Lines that say where other processes took more than a tenth of a core."""
    lines = []
    for mode in book.about["modes"]:
        runs = [run for run in book.runs if run.mode == mode]
        share = sum(run.elsewhere_s for run in runs) / sum(run.seconds for run in runs) if runs else 0.0
        if share > BUSY:
            lines.append(f"While {mode} ran, other processes used {share:.0%} of a core: its speeds mean little.")
    return lines


def failed(book: Book) -> list[str]:
    return [f"{mode} could not be measured: {why}" for mode, why in book.failures.items()]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Names to the left, figures to the right."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))
