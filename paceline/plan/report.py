"""A plan for people and as a record, with the source of every kind of figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from paceline.plan.fleet import BatchSpeed, Plan
from paceline.plan.gpus import ESTIMATED_SOURCE, LINK_SOURCE, MEASURED_SOURCE
from paceline.plan.speed import Step
from paceline.sizes import format_size

Record = dict[str, Any]
ACCEPTANCE_SOURCE = "given, not measured"


def record(plan: Plan) -> Record:
    question, machine, memory = plan.question, plan.machine, plan.memory
    return {
        "plan": question.model,
        "gpu": {"name": question.gpu.name, "title": question.gpu.title, "source": question.gpu.source},
        "gpus": question.count,
        "tensor_parallel": machine.place.ranks,
        "replicas": plan.replicas,
        "parameters": machine.target.parameters,
        "format": machine.target.format,
        "drafter": machine.drafter and {"name": machine.drafter.name, "how": machine.drafter.how},
        "drafter_tensor_parallel": machine.drafter.ranks if machine.drafter else 1,
        "acceptance": question.acceptance,
        "context": question.context,
        "memory": {**asdict(memory), "kv": memory.kv, "kv_tokens": memory.kv_tokens},
        "largest_batch": plan.largest_batch,
        "batches": [_batch(speed) for speed in plan.speeds],
        "pace": asdict(question.gpu.pace),
        "sources": _sources(plan),
        "notes": list(plan.notes),
    }


def _sources(plan: Plan) -> dict[str, str]:
    """Where each kind of figure comes from."""
    gpu = plan.question.gpu
    found = {
        "speed": MEASURED_SOURCE if gpu.measured else ESTIMATED_SOURCE,
        "memory": f"{gpu.source}; weights from headers, workspace an estimate",
    }
    if plan.question.acceptance is not None:
        found["acceptance"] = ACCEPTANCE_SOURCE
    if plan.machine.place.ranks > 1:
        found["sums across ranks"] = f"{gpu.link.name}: {LINK_SOURCE}"
    return found


def _batch(speed: BatchSpeed) -> Record:
    found: Record = {"batch": speed.plain.sequences, "plain": _step(speed.plain)}
    if speed.speculative is not None:
        found["speculative"] = _step(speed.speculative)
        found["ratio"] = speed.speculative.tok_s / speed.plain.tok_s
    return found | {"least_acceptance": speed.least_acceptance}


def _step(step: Step) -> Record:
    return {
        "tok_s": step.tok_s,
        "step_ms": 1e3 * step.seconds,
        "tokens_per_step": step.tokens,
        "draft": step.draft,
    }


def text(plan: Plan) -> str:
    question, machine = plan.question, plan.machine
    drafter = f" + {machine.drafter.name}: {machine.drafter.how}" if machine.drafter else ""
    ranks = machine.place.ranks
    lines = [
        f"{question.model}, {_parameters(machine.target.parameters)} parameters in {machine.target.format}{drafter}",
        f"{question.count} × {question.gpu.title}: {plan.replicas} {_replicas(plan.replicas)} of {ranks} "
        f"{'GPUs' if ranks > 1 else 'GPU'}",
        "",
        *_memory_lines(plan),
        "",
        *_table(plan),
        "",
        *(f"{what}: {source}" for what, source in _sources(plan).items()),
        *plan.notes,
    ]
    return "\n".join(lines)


def _parameters(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def _replicas(count: int) -> str:
    return "replica" if count == 1 else "replicas"


def _memory_lines(plan: Plan) -> list[str]:
    memory, context = plan.memory, plan.question.context
    drafter = f", drafter {format_size(memory.drafter)}" if memory.drafter else ""
    return [
        f"memory of a GPU: {format_size(memory.total)}; weights {format_size(memory.weights)}{drafter}, workspace "
        f"{format_size(memory.workspace)}, KV {format_size(memory.kv)}",
        f"KV room: {memory.kv_tokens} tokens ({memory.kv_token} bytes each on a GPU): "
        f"{memory.sequences(context)} sequences of {context} tokens; largest batch {plan.largest_batch}",
    ]


def _table(plan: Plan) -> list[str]:
    """Speeds of one replica; with several, also of all."""
    all_of_them = plan.replicas > 1
    known = plan.speeds[0].speculative is not None
    header = ["batch", "plain tok/s", "ms/step"]
    header += ["with drafts", "drafted", "× plain"] if known else []
    header += ["pays from"] if plan.machine.drafter else []
    header += [f"all {plan.replicas}"] if all_of_them else []
    return aligned([header, *(_row(plan, speed, all_of_them=all_of_them) for speed in plan.speeds)])


def _row(plan: Plan, speed: BatchSpeed, *, all_of_them: bool) -> list[str]:
    best = speed.speculative or speed.plain
    cells = [str(speed.plain.sequences), f"{speed.plain.tok_s:.0f}", f"{1e3 * speed.plain.seconds:.2f}"]
    if speed.speculative is not None:
        cells += [f"{best.tok_s:.0f}", f"{best.draft:.0f}", f"{best.tok_s / speed.plain.tok_s:.2f}"]
    if plan.machine.drafter:
        cells.append("never" if speed.least_acceptance is None else f"{speed.least_acceptance:.2f}")
    return [*cells, f"{plan.replicas * best.tok_s:.0f}"] if all_of_them else cells


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Write cells in columns, flush right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
