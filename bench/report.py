"""From single runs to what is printed: medians, and ratios of runs that lay next to each other in time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.systems import System


@dataclass(frozen=True, slots=True)
class Run:
    """One generation of one system. Runs with the same round and prompt lay next to each other in time."""

    system: str
    round: int
    prompt: str
    tokens: int
    decode_s: float
    text: str
    drafted: int = 0
    accepted: int = 0
    elsewhere_s: float = 0.0  # CPU time that other processes used meanwhile, sleeping workers included

    @property
    def speed(self) -> float:
        return (self.tokens - 1) / self.decode_s

    @property
    def turn(self) -> tuple[int, str]:
        return self.round, self.prompt


@dataclass(frozen=True, slots=True)
class Summary:
    system: str
    median: float  # tokens/s
    low: float  # quartiles
    high: float
    runs: int
    over_plain: float | None  # median ratio to its own plain speed, run by run
    same_text: str | None  # how many prompts gave the text of the plain system
    acceptance: float | None
    elsewhere: float  # cores that other processes kept busy meanwhile: near 0, or the speeds mean little


def summarise(system: System, runs: Sequence[Run]) -> Summary:
    mine = [run for run in runs if run.system == system.name]
    speeds = sorted(run.speed for run in mine)
    drafted = sum(run.drafted for run in mine)
    return Summary(
        system=system.name,
        median=statistics.median(speeds),
        low=speeds[len(speeds) // 4],
        high=speeds[(3 * len(speeds)) // 4],
        runs=len(mine),
        over_plain=paired_ratio(runs, system.name, system.plain) if system.plain else None,
        same_text=same_text(runs, system.name, system.plain) if system.plain else None,
        acceptance=sum(run.accepted for run in mine) / drafted if drafted else None,
        elsewhere=sum(run.elsewhere_s for run in mine) / sum(run.decode_s for run in mine),
    )


def paired_ratio(runs: Sequence[Run], system: str, other: str) -> float:
    """Median over turns of how much faster `system` was than `other` on the same prompt in the same round."""
    theirs = {run.turn: run.speed for run in runs if run.system == other}
    return statistics.median(run.speed / theirs[run.turn] for run in runs if run.system == system)


def same_text(runs: Sequence[Run], system: str, other: str) -> str:
    theirs = {run.turn: run.text for run in runs if run.system == other}
    mine = [run for run in runs if run.system == system]
    return f"{sum(run.text == theirs[run.turn] for run in mine)}/{len(mine)}"


def table(summaries: Sequence[Summary]) -> str:
    header = ["system", "tokens/s", "quartiles", "× own plain", "same text", "accepted"]
    rows = [header, ["---", "---:", "---:", "---:", "---:", "---:"]]
    for s in summaries:
        over = "" if s.over_plain is None else f"{s.over_plain:.2f}"
        accepted = "" if s.acceptance is None else f"{s.acceptance:.0%}"
        rows.append([s.system, f"{s.median:.1f}", f"{s.low:.1f}-{s.high:.1f}", over, s.same_text or "", accepted])
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = ("| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in rows)
    return "\n".join(lines)


def versus_peers(systems: Sequence[System], runs: Sequence[Run]) -> dict[str, float]:
    """Each of Paceline's systems against the peer with the best median."""
    medians = {s.name: summarise(s, runs).median for s in systems}
    peers = [s.name for s in systems if s.is_peer]
    if not peers:
        return {}
    best = max(peers, key=medians.__getitem__)
    return {f"{s.name} / {best}": paired_ratio(runs, s.name, best) for s in systems if not s.is_peer}
