"""Tables of a comparison with peers: medians over rounds, and ratios of measurements of the same round."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from peers.results import Measurement, Results

BUSY_SHARE = 0.1  # CPU time of other processes by wall time; more is reported


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second: median, lowest and highest over rounds."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.1f} ({self.low:.1f}–{self.high:.1f})"


def speed(runs: Sequence[Measurement]) -> Speed:
    found = [run.speed for run in runs]
    return Speed(statistics.median(found), min(found), max(found))


def of_mode(results: Results, mode: str, *, name: str, at_once: int) -> list[Measurement]:
    return [run for run in results.measurements if run.mode == mode and run.set == name and run.at_once == at_once]


def same(results: Results, mode: str, *, at_once: int | None = None) -> str:
    """Answers of a drafting mode that equal those of its plain mode, of all; empty for a plain mode."""
    plain = results.about["modes"][mode]["plain"]
    if plain is None:
        return ""
    theirs = {(run.cell, id): d for run in results.measurements if run.mode == plain for id, d in _digests(run)}
    pairs = [
        (digest, theirs[run.cell, id])
        for run in results.measurements
        if run.mode == mode and at_once in (None, run.at_once)
        for id, digest in _digests(run)
        if (run.cell, id) in theirs
    ]
    return f"{sum(a == b for a, b in pairs)}/{len(pairs)}" if pairs else ""


def _digests(run: Measurement) -> list[tuple[str, str]]:
    return list(zip(run.prompts, run.digests, strict=True))


def whole_table(results: Results, *, at_once: int) -> str:
    """Speed of every mode on every set."""
    sets = results.about["plan"]["sets"]
    rows = []
    for mode in results.about["modes"]:
        cells = [_cell(of_mode(results, mode, name=name, at_once=at_once)) for name in sets]
        if any(cells):
            rows.append([mode, *cells, same(results, mode, at_once=at_once)])
    return markdown(["system, mode", *sets, "same as own plain"], rows)


def _cell(runs: Sequence[Measurement]) -> str:
    return str(speed(runs)) if runs else ""


def best_table(results: Results) -> str:
    """Speed of each system's best mode, by set and prompts at once."""
    plan = results.about["plan"]
    columns = [(name, int(at_once)) for at_once in plan["counts"] for name in plan["sets"]]
    systems = {mode: about["system"] for mode, about in results.about["modes"].items()}
    rows = []
    for system in dict.fromkeys(systems.values()):
        modes = [mode for mode, name in systems.items() if name == system]
        rows.append(
            [system, *(_best(results, modes, name=n, at_once=k) for n, k in columns), _same_of_all(results, modes)]
        )
    head = [f"{name}, {at_once} at once" if at_once > 1 else name for name, at_once in columns]
    return markdown(["tokens/s, best mode", *head, "same text"], [row for row in rows if any(row[1:])])


def _best(results: Results, modes: Sequence[str], *, name: str, at_once: int) -> str:
    medians = [speed(runs).median for mode in modes if (runs := of_mode(results, mode, name=name, at_once=at_once))]
    return f"{max(medians):.0f}" if medians else ""


def _same_of_all(results: Results, modes: Sequence[str]) -> str:
    found = [text.split("/") for mode in modes if (text := same(results, mode))]
    return f"{sum(int(a) for a, _ in found)}/{sum(int(b) for _, b in found)}" if found else ""


def best_ratios(results: Results) -> str:
    """Paceline's default against each set's best peer: the median over rounds of the ratio within a round."""
    plan = results.about["plan"]
    rows = []
    for at_once in map(int, plan["counts"]):
        for name in plan["sets"]:
            row = _against_best(results, name=name, at_once=at_once)
            rows += [[name, str(at_once), *row]] if row else []
    return markdown(["set", "at once", "Paceline's best", "peers' best", "ratio (lowest–highest round)"], rows)


def _against_best(results: Results, *, name: str, at_once: int) -> list[str]:
    medians = {
        mode: speed(runs).median
        for mode in results.about["modes"]
        if (runs := of_mode(results, mode, name=name, at_once=at_once))
    }
    own = {mode: median for mode, median in medians.items() if not results.about["modes"][mode]["is_peer"]}
    peers = {mode: median for mode, median in medians.items() if mode not in own}
    if not own or not peers:
        return []
    ours, theirs = (max(found, key=found.__getitem__) for found in (own, peers))
    return [ours, theirs, _paired(results, ours, theirs, name=name, at_once=at_once)]


def _paired(results: Results, ours: str, theirs: str, *, name: str, at_once: int) -> str:
    other = {run.round: run.speed for run in of_mode(results, theirs, name=name, at_once=at_once)}
    ratios = [
        run.speed / other[run.round] for run in of_mode(results, ours, name=name, at_once=at_once) if run.round in other
    ]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})" if ratios else ""


def disturbed(results: Results) -> list[str]:
    """Warnings for modes during which other processes used more than BUSY_SHARE of a core."""
    lines = []
    for mode in results.about["modes"]:
        runs = [run for run in results.measurements if run.mode == mode]
        share = sum(run.elsewhere_s for run in runs) / sum(run.seconds for run in runs) if runs else 0.0
        if share > BUSY_SHARE:
            lines.append(f"While {mode} ran, other processes used {share:.0%} of a core: its speeds mean little.")
    return lines


def failed(results: Results) -> list[str]:
    return [f"{mode} could not be measured: {why}" for mode, why in results.failures.items()]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, with the first column aligned left and the others right."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))
