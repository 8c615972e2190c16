"""Results of `bench engine`: medians, ratios of runs of the same round, and the distance to the bandwidth limit.

A mix is compared with the same mode without it: its `ratio` says what these requests cost all of the batch. Figures
that depend on a synthetic acceptance have it in their names: `synthetic_speculative`, `synthetic_ratio`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from paceline.bench.conclusion import Outcome, conclusion
from paceline.bench.engine import BatchRun, Measured, Mode

Record = dict[str, Any]
PARTS = ("draft", "verify", "accept", "host", "wait")  # parts of a step
DEFINITION = "tok_s: tokens a second while all requests of the batch decode; to_the_end_tok_s: until the last has ended"
BANDWIDTH_DEFINITION = (
    "limit: bytes a step must read (weights, KV of the mean context) / bandwidth of a copy in device memory"
)


def record(measured: Measured, *, command: str) -> Record:
    setup = measured.setup
    batches = [batch for batch in setup.batches if _runs(measured, batch, "plain")]
    return {
        "benchmark": "engine",
        "definition": DEFINITION,
        "total_definition": "total_tok_s: all output tokens / seconds from submission, prompts included",
        "bandwidth_definition": BANDWIDTH_DEFINITION,
        "acceptance": "real" if setup.acceptance is None else f"synthetic {setup.acceptance:g}",
        "command": command,
        "setup": asdict(setup),
        "machine": dict(measured.machine),
        "copy_bandwidth": measured.bandwidth,
        "interleaved": measured.interleaved,
        "engines": {mode: dict(facts) for mode, facts in measured.engines.items()},
        "batches": [_batch(measured, batch) for batch in batches],
        "interrupted": measured.interrupted,
        "conclusion": _conclusion(measured, batches),
    }


def _conclusion(measured: Measured, batches: Sequence[int]) -> str:
    """Conclude from the range of the rounds' ratios, and the tokens of the first round."""
    setup = measured.setup
    outcomes = []
    for batch in batches:
        if ratios := _ratios(measured, batch, "speculative"):
            interval = (min(ratios), max(ratios)) if len(ratios) > 1 else None
            same = None if setup.synthetic else int(same_tokens(measured, batch).partition("/")[0])
            outcomes.append(Outcome(f"batch {batch}", statistics.median(ratios), interval, same, batch))
    if setup.drafter is None:
        best = max((_median(_runs(measured, batch, "plain"), lambda run: run.tok_s) for batch in batches), default=0.0)
        return f"{'Interrupted; so far: ' * measured.interrupted}Plain decoding gives up to {best:.0f} tokens a second."
    lead = f"{'With SYNTHETIC acceptance, speculation' if setup.synthetic else 'Speculation'} makes {setup.target}"
    return conclusion(lead, outcomes, interrupted=measured.interrupted)


def _batch(measured: Measured, batch: int) -> Record:
    prefix = "synthetic_" if measured.setup.synthetic else ""
    found: Record = {"batch": batch, "plain": _mode(measured, batch, "plain")}
    if _runs(measured, batch, "speculative"):
        found[f"{prefix}speculative"] = _mode(measured, batch, "speculative")
        found[f"{prefix}ratio"] = ratio(measured, batch, "speculative")
        if not prefix:
            found["same_tokens"] = same_tokens(measured, batch)
    if _runs(measured, batch, "off"):
        found["off"] = _mode(measured, batch, "off")
        found["off_ratio"] = ratio(measured, batch, "off")
    if measured.setup.mixes:
        found["mixes"] = [
            {"mix": str(mix), "mode": mode, "ratio": _mix_ratio(measured, batch, mode, str(mix))}
            | _mode(measured, batch, mode, str(mix))
            for mode in measured.engines
            for mix in measured.setup.mixes
            if _runs(measured, batch, mode, str(mix))
        ]
    return found


def _mix_ratio(measured: Measured, batch: int, mode: Mode, mix: str) -> float:
    """Divide the speed by that of the same mode, round and batch without the mix; return the median over rounds."""
    alone = {run.round: run.tok_s for run in _runs(measured, batch, mode)}
    return statistics.median(run.tok_s / alone[run.round] for run in _runs(measured, batch, mode, mix))


def _mode(measured: Measured, batch: int, mode: Mode, mix: str = "") -> Record:
    runs = _runs(measured, batch, mode, mix)
    speeds = [run.tok_s for run in runs]
    step = _median(runs, lambda run: run.seconds / run.steps)
    limit = _median(runs, lambda run: limit_seconds(measured, run))
    drafted = sum(run.drafted for run in runs)
    tokens_per_step = _median(runs, lambda run: run.tokens / run.sequence_steps)
    return {
        "tok_s": statistics.median(speeds),
        "tok_s_runs": speeds,
        "to_the_end_tok_s": _median(runs, lambda run: run.to_the_end_tok_s),
        "total_tok_s": _median(runs, lambda run: run.total_tok_s),
        "tokens_per_step": tokens_per_step,
        "tokens_per_round": tokens_per_step,  # the older name
        "accepted_share": sum(run.accepted for run in runs) / drafted if drafted else None,
        "step_ms": 1e3 * step,
        "parts_ms": {part: _part_ms(runs, part) for part in PARTS},
        "host_share": _median(runs, lambda run: run.host_seconds / run.seconds),
        "gpu_idle": _gpu_idle(measured, runs),
        "limit_ms": 1e3 * limit,
        "bandwidth_fraction": _median(runs, lambda run: limit_seconds(measured, run) / (run.seconds / run.steps)),
        "preemptions": sum(run.preemptions for run in runs),
    }


def limit_seconds(measured: Measured, run: BatchRun) -> float:
    """Compute the seconds that memory traffic alone needs for the mean step of a run."""
    setup = measured.setup
    sequences = run.sequence_steps / run.steps
    need = measured.traffic[run.mode].per_step(
        sequences=sequences,
        context=setup.prompt_tokens + setup.output_tokens / 2,
        drafted=run.drafted / run.sequence_steps,
    )
    return need / measured.bandwidth


def ratio(measured: Measured, batch: int, mode: Mode) -> float:
    """Divide the speed by that of the plain run of the same round; return the median over rounds."""
    return statistics.median(_ratios(measured, batch, mode))


def _ratios(measured: Measured, batch: int, mode: Mode) -> list[float]:
    plain = {run.round: run.tok_s for run in _runs(measured, batch, "plain")}
    return [run.tok_s / plain[run.round] for run in _runs(measured, batch, mode) if run.round in plain]


def same_tokens(measured: Measured, batch: int) -> str:
    """Count the requests of the first round with equal tokens in plain and speculative runs: "count/all"."""
    plain, mine = (_runs(measured, batch, mode)[0].outputs for mode in ("plain", "speculative"))
    return f"{sum(a == b for a, b in zip(plain, mine, strict=True))}/{batch}"


def _runs(measured: Measured, batch: int, mode: str, mix: str = "") -> list[BatchRun]:
    return [run for run in measured.runs if (run.batch, run.mode, run.mix) == (batch, mode, mix)]


def _median(runs: Sequence[BatchRun], of: Callable[[BatchRun], float]) -> float:
    return statistics.median(map(of, runs))


def _part_ms(runs: Sequence[BatchRun], part: str) -> float:
    return _median(runs, lambda run: 1e3 * float(getattr(run, f"{part}_seconds")) / run.steps)


def _gpu_idle(measured: Measured, runs: Sequence[BatchRun]) -> float | None:
    """Share of the time in which no part of a round ran on the device; None on a CPU, or without device clocks."""
    if measured.machine["device"] != "cuda" or not all(map(_busy, runs)):
        return None
    return _median(runs, lambda run: max(0.0, 1 - _busy(run) / run.seconds))


def _busy(run: BatchRun) -> float:
    return run.draft_seconds + run.verify_seconds + run.accept_seconds


def _prompts(setup: Mapping[str, Any]) -> str:
    if setup["prompts"]:
        return f"{', '.join(setup['prompts'])}, prompts of at most {setup['prompt_tokens']} tokens"
    return f"{setup['prompt_tokens']} tokens in"


def text(record: Record) -> str:
    """The record for people: the machine, and a table."""
    machine, setup = record["machine"], record["setup"]
    most = "at most " if setup["governed"] or setup["prompts"] else ""
    beside = " and ngram, as a portfolio" if setup["portfolio"] else ""
    drafter = f" + {setup['drafter']}{beside}, {most}{setup['draft']} drafted" if setup["drafter"] else ""
    lines = [
        f"{setup['target']}{drafter} · {_prompts(setup)}, {setup['output_tokens']} tokens out, greedy",
        f"{machine.get('gpu') or machine['cpu']} · torch {machine['torch']} · paceline {machine['paceline']} "
        f"({machine['commit']}) · copy {record['copy_bandwidth'] / 1e9:.0f} GB/s",
    ]
    if setup["acceptance"] is not None:
        lines.append(f"SYNTHETIC acceptance of {setup['acceptance']:g} a position: the text means nothing")
    if setup["drafter"] and not record["interleaved"]:
        lines.append("plain and speculative runs did not take turns: no memory for both engines at once")
    notes = [record["definition"], record["bandwidth_definition"]]
    return "\n".join([*lines, "", *_table(record), "", *notes, "", record["conclusion"]])


HEADER = [
    "batch",
    "mode",
    "tok/s",
    "× plain",
    "to the end",
    "total",
    "tokens/step",
    "ms/step",
    *PARTS,
    "idle",
    "of limit",
]
MODES = ("plain", "speculative", "synthetic_speculative", "off")


def _table(record: Record) -> list[str]:
    rows = [HEADER]
    for found in record["batches"]:
        rows += [_row(found, key) for key in MODES if key in found]
        rows += [_figures(found, f"{mix['mode']}, {mix['mix']}", mix, mix["ratio"]) for mix in found.get("mixes", ())]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _row(found: Record, key: str) -> list[str]:
    over = {
        "speculative": found.get("ratio"),
        "synthetic_speculative": found.get("synthetic_ratio"),
        "off": found.get("off_ratio"),
    }.get(key)
    return _figures(found, key.replace("_", " "), found[key], over)


def _figures(found: Record, name: str, mode: Record, over: float | None) -> list[str]:
    return [
        str(found["batch"]),
        name,
        f"{mode['tok_s']:.1f}",
        "" if over is None else f"{over:.2f}" if "speculative" in name else f"{over:.3f}",
        f"{mode['to_the_end_tok_s']:.1f}",
        f"{mode['total_tok_s']:.1f}",
        f"{mode['tokens_per_step']:.2f}",
        f"{mode['step_ms']:.3f}",
        *(f"{mode['parts_ms'][part]:.3f}" for part in PARTS),
        "" if mode["gpu_idle"] is None else f"{mode['gpu_idle']:.1%}",
        f"{mode['bandwidth_fraction']:.0%}",
    ]
