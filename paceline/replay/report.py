"""The record of a replay, and its text for people.

Runs have the keys of `bench serve`, so that its tables, pages and `bench compare` read them. Every record carries the
notes of the traffic, where acceptance comes from, and the measured times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.bench.client import RequestOutcome
from paceline.bench.serve import LoadRun
from paceline.bench.serve_record import DEFINITION, figures
from paceline.bench.serve_text import HEADER, failures, number, run_row, runs_of, table
from paceline.bench.workloads import BenchPrompt
from paceline.replay.arrivals import Schedule
from paceline.replay.simulate import Run

Record = dict[str, Any]
SHOWN = {
    "output_throughput": ("tokens a second", 0.10),
    "median_ttft_ms": ("TTFT p50, ms", 0.10),
    "p99_ttft_ms": ("TTFT p99, ms", 0.20),
    "median_tpot_ms": ("TPOT p50, ms", 0.10),
    "p99_tpot_ms": ("TPOT p99, ms", 0.20),
    "median_e2el_ms": ("whole answer p50, ms", 0.10),
    "p99_e2el_ms": ("whole answer p99, ms", 0.20),
    "busy_seconds": ("busy, s", 0.10),
}  # figure → its name, and the relative error that a simulation may have
SECONDS_OF_HOUR = 3600


def simulated_run(run: Run) -> Record:
    return {
        "arm": run.name,
        "load": "simulated",
        **figures(run.outcomes, seconds=run.seconds, counters=run.counters),
        **_busy(run.outcomes),
        "never_due": run.not_sent,
        "preemptions": run.stats.preemptions if run.stats is not None else 0,
        "interrupted": run.interrupted,
    }


def real_record(run: LoadRun, *, asked: int, interrupted: bool) -> Record:
    """`asked`: answers of the whole schedule. An interrupt leaves some open, which are in no list."""
    return {
        "arm": run.arm.name,
        "load": "real",
        "model_id": run.arm.model,
        "base_url": run.arm.client.root,
        **figures(run.outcomes, seconds=run.seconds, not_sent=run.not_sent, counters=run.counters),
        **_busy(run.outcomes),
        "never_due": asked - len(run.outcomes) - run.not_sent,
        "interrupted": interrupted,
    }


def recorded_outcomes(schedule: Schedule) -> list[RequestOutcome]:
    """Make outcomes of what the server had measured; none if any is missing, or if other times are replayed."""
    found: list[RequestOutcome] = []
    for arrival in () if schedule.changed else schedule.arrivals:
        stats = arrival.answer.stats
        if "time_to_first" not in stats or "time_total" not in stats:
            return []
        served = arrival.answer.delivery
        outcome = RequestOutcome(BenchPrompt(arrival.id, ""), started=arrival.due, ttft=stats["time_to_first"] + served)
        outcome.latency, outcome.output_tokens = stats["time_total"] + served, arrival.answer.length
        outcome.counted = True
        outcome.prompt_tokens = arrival.request.length
        found.append(outcome)
    return found


def unknowns(schedule: Schedule) -> list[str]:
    """Say what a simulation does not know of this traffic."""
    arrivals, notes = schedule.arrivals, []
    if any(arrival.request.sampling.grammar is not None for arrival in arrivals):
        notes.append("some requests have a grammar: the tokens that it forces, and its masks, are not simulated")
    if any(arrival.answer.finish in ("abort", "deadline") for arrival in arrivals):
        notes.append("some answers were aborted: each is as long as it was when it ended")
    if not any(arrival.answer.pages for arrival in arrivals):
        notes.append("no pages of answers are recorded: prompts that repeat earlier answers find less in the cache")
    return notes


def recorded_run(outcomes: Sequence[RequestOutcome]) -> Record:
    """The figures that the server itself had measured, on its own clock."""
    seconds = max(outcome.started + outcome.latency for outcome in outcomes)
    without_chunks = {**figures(outcomes, seconds=seconds), "tokens_per_chunk": None}
    return {"arm": "as recorded", "load": "record", **without_chunks, **_busy(outcomes)}


def _busy(outcomes: Sequence[RequestOutcome]) -> Record:
    """Seconds in which any request was open: what a machine that may sleep between requests is needed for."""
    busy, until = 0.0, float("-inf")
    for began, ended in sorted((each.started, each.started + each.latency) for each in outcomes):
        busy += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return {"busy_seconds": busy, "device_hours": busy / SECONDS_OF_HOUR}


def record(runs: Sequence[Record], facts: Mapping[str, Any], *, notes: Sequence[str]) -> Record:
    interrupted = any(run.get("interrupted") for run in runs)
    return {
        "benchmark": "replay",
        "definition": f"{DEFINITION}; busy: while any request is open",
        **facts,
        "runs": list(runs),
        "notes": list(notes),
        "interrupted": interrupted,
        "conclusion": _conclusion(runs, interrupted=interrupted),
    }


def _conclusion(runs: Sequence[Record], *, interrupted: bool) -> str:
    """Say what speculation changes, by the first plain and the best speculative run of those that were simulated."""
    lead = "Interrupted: a part of the traffic. " if interrupted else ""
    plain = next((run for run in runs if run["load"] == "simulated" and run["arm"].startswith("plain")), None)
    others = [run for run in runs if run["load"] == "simulated" and run is not plain and run["median_tpot_ms"]]
    if plain is None or not others or not plain["median_tpot_ms"]:
        mine = [run for run in runs if run["load"] != "record"]
        done = sum(run["completed"] for run in mine)
        return f"{lead}{done} of {sum(map(_asked, mine))} answers came to their end."
    best = min(others, key=lambda run: float(run["median_tpot_ms"]))
    return (
        f"{lead}Simulated, {best['arm']} against {plain['arm']}: TPOT {best['median_tpot_ms']:.1f} instead of "
        f"{plain['median_tpot_ms']:.1f} ms, TTFT {best['median_ttft_ms']:.0f} instead of "
        f"{plain['median_ttft_ms']:.0f} ms (medians), busy {best['busy_seconds']:.0f} instead of "
        f"{plain['busy_seconds']:.0f} s."
    )


def _asked(run: Record) -> int:
    return sum(int(run[name]) for name in ("completed", "failed", "not_sent", "never_due"))


def text(found: Record) -> str:
    runs = runs_of(found)
    rows = [HEADER, *map(run_row, runs)]
    kept = [i for i in range(len(HEADER)) if any(row[i] for row in rows[1:])]
    parts = [table([[row[i] for i in kept] for row in rows]), "\n".join(map(_busy_line, runs)), found["definition"]]
    parts += [f"acceptance {found['acceptance']}"] if found.get("acceptance") else []
    parts += [f"times {found['scaling']}"] if found.get("scaling") else []
    if found.get("delivery"):
        passed = f"{1e3 * found['delivery']:.1f} ms pass outside of the engine before the first token"
        parts.append(f"{passed}, as in {found['delivery_source']}")
    parts += ["\n".join(f"note: {note}" for note in found["notes"])] if found["notes"] else []
    parts += [line for run in runs for line in failures(run)]
    parts += [errors_text(found["errors_against"])] if found.get("errors_against") else []
    return "\n\n".join([*parts, found["conclusion"]])


def _busy_line(run: Record) -> str:
    return (
        f"{run['load']} {run['arm']}: busy {run['busy_seconds']:.1f} of {run['duration']:.1f} s, "
        f"{run['device_hours']:.4f} device hours, at most {run['max_concurrent_requests']} requests at once"
    )


def errors_against(mine: Record, theirs: Record) -> list[Record]:
    """Compare a simulated run with a real one, figure by figure."""
    found = []
    for key, (name, limit) in SHOWN.items():
        simulated, real = mine.get(key), theirs.get(key)
        if simulated is not None and real:
            error = simulated / real - 1
            found.append(
                {"figure": name, "simulated": simulated, "real": real, "error": error, "holds": abs(error) <= limit}
            )
    return found


def errors_text(errors: Sequence[Record]) -> str:
    header = ("figure", "simulated", "real", "error", "")
    rows = [
        (
            each["figure"],
            number(each["simulated"], ".1f"),
            number(each["real"], ".1f"),
            f"{each['error']:+.1%}",
            "" if each["holds"] else "too far",
        )
        for each in errors
    ]
    return table([header, *rows])
