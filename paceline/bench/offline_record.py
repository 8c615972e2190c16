"""Results of `bench offline`: a record for programs, and tables for people.

A cell has its speed beside plain decoding of the same prompts, with the interval of the ratio. The seconds of a unit
are its median over rounds, and the bootstrap draws units. With too few units it draws single turns: the interval then
covers the machine's noise, not other prompts. Where answers are degenerate (loops are easy to guess) the ratio is no
claim about useful text, and the record says so.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from paceline.audit.degeneration import degeneration, void
from paceline.audit.replay import Replay
from paceline.bench.conclusion import Outcome, conclusion
from paceline.bench.offline import PARTS, Cell, Turn, Unit
from paceline.bench.serve_text import number, ratio_text, table
from paceline.bench.statistics import MIN_UNITS, Ratio, paired_ratio
from paceline.types import Finish

Record = dict[str, Any]
SUMMARY_KEYS = (
    "plain_tok_s", "speculative_tok_s", "ratio", "ratio_interval", "tokens_per_step", "tokens_per_round", "identical",
    "prompts",
)  # fmt: skip  # a key a line would hide what belongs together
DEFINITION = (
    "tok_s: tokens a second after every request of a batch has its first, medians over rounds; ratio: speculative by "
    "plain, paired by batch, with a 95 % bootstrap interval; tokens_per_step: output tokens by steps of a sequence "
    "that gave output"
)


def record(measured: Sequence[tuple[Sequence[Cell], Sequence[Unit]]], facts: Mapping[str, Any]) -> Record:
    """The record of all cells; the figures of the first speculative cell are repeated at the top level."""
    cells = [cell_record(cell, plain, units) for (plain, *rest), units in measured for cell in rest]
    first = {name: cells[0][name] for name in SUMMARY_KEYS}
    found = {"benchmark": "offline", "definition": DEFINITION, **facts, "cells": cells, **first}
    return found | {"conclusion": _conclusion(found)}


def _conclusion(found: Record) -> str:
    outcomes = [
        Outcome(
            name=f"batch {cell['batch']}, T={cell['temperature']:g}, {cell['drafter']}",
            ratio=cell["ratio"],
            interval=cell["ratio_interval"],
            same=cell["identical"],
            answers=cell["prompts"],
            void=cell["claim_is_void"],
        )
        for cell in found["cells"]
    ]
    return conclusion(f"Speculation makes {found['target']}", outcomes, interrupted=found.get("interrupted", False))


def cell_record(cell: Cell, plain: Cell, units: Sequence[Unit]) -> Record:
    answers = [answer for unit in units for answer in unit.turns[cell][0].answers]
    reference = [answer for unit in units for answer in unit.turns[plain][0].answers]
    ratio, sizes = _ratio(units, cell, plain), step_sizes(answers)
    return {
        "drafter": cell.name,
        "max_draft": cell.speculation.max_draft,
        "batch": cell.batch,
        "temperature": cell.temperature,
        "rule": str(cell.speculation.rule),
        "prompts": len(answers),
        "identical": sum(a.tokens == b.tokens for a, b in zip(answers, reference, strict=True)),
        "output_tokens": sum(len(answer.tokens) for answer in answers),
        "plain_tok_s": _speed(units, plain),
        "speculative_tok_s": _speed(units, cell),
        "ratio": None if ratio is None else ratio.value,
        "ratio_interval": None if ratio is None or ratio.low is None else [ratio.low, ratio.high],
        "units": 0 if ratio is None else ratio.units,
        "verdict": "unknown" if ratio is None else ratio.verdict,
        **drafts(answers),
        "tokens_per_step_counts": sizes,
        "tokens_per_round_counts": sizes,  # the older name
        "plain_ms_per_step": parts_ms(units, plain),
        "speculative_ms_per_step": parts_ms(units, cell),
        "categories": _categories(cell, plain, units),
        "off_reasons": dict(Counter(a.stats.off_reason for a in answers if a.stats.off_reason).most_common()),
        **_degenerate(answers),
        "unit_plain": [_seconds(unit.turns[plain]) for unit in units],
        "unit_speculative": [_seconds(unit.turns[cell]) for unit in units],
    }


def drafts(answers: Sequence[Replay]) -> Record:
    """Figures about drafts, summed over answers."""
    stats = [answer.stats for answer in answers]
    steps, rounds, drafted = (sum(getattr(s, name) for s in stats) for name in ("steps", "rounds", "drafted"))
    accepted: Counter[int] = Counter()  # tokens by position in the draft
    for one in stats:
        accepted.update(dict(enumerate(one.accepted_by_position)))
    per_step = sum(s.output_tokens for s in stats) / steps if steps else 0.0
    return {
        "tokens_per_step": per_step,
        "tokens_per_round": per_step,  # the older name
        "acceptance": sum(s.accepted for s in stats) / drafted if drafted else None,
        "acceptance_by_position": [accepted[i] / rounds for i in sorted(accepted)],
        "drafted_per_round": drafted / rounds if rounds else None,
        "drafted_share_of_steps": rounds / steps if steps else 0.0,
    }


def tokens_per_step(found: Record) -> float:
    """The figure of a record of any version: older files call it tokens_per_round."""
    return float(found["tokens_per_step"] if "tokens_per_step" in found else found["tokens_per_round"])


def step_sizes(answers: Sequence[Replay]) -> dict[str, int]:
    """Number of steps by the tokens that they gave to a sequence."""
    sizes = Counter(chain.from_iterable(Counter(answer.steps).values() for answer in answers))
    return {str(size): sizes[size] for size in sorted(sizes)}


def parts_ms(units: Sequence[Unit], cell: Cell) -> Record:
    """Milliseconds of a step by part, over all turns of a cell."""
    turns = [turn for unit in units for turn in unit.turns[cell]]
    steps = sum(turn.steps for turn in turns)
    return {part: 1e3 * sum(turn.parts[part] for turn in turns) / steps if steps else None for part in PARTS}


def _categories(cell: Cell, plain: Cell, units: Sequence[Unit]) -> Record:
    """Figures by category. A category has a ratio only where batches are single prompts."""
    found: Record = {}
    for name in sorted({prompt.category for unit in units for prompt in unit.prompts}):
        mine = [
            answer
            for unit in units
            for prompt, answer in zip(unit.prompts, unit.turns[cell][0].answers, strict=True)
            if prompt.category == name
        ]
        alone = [unit for unit in units if cell.batch == 1 and unit.prompts[0].category == name]
        ratio = _ratio(alone, cell, plain) if alone else None
        found[name] = {"prompts": len(mine), **({} if ratio is None else ratio.record()), **drafts(mine)}
    return found


def _degenerate(answers: Sequence[Replay]) -> Record:
    signs = [degeneration(a.tokens, stopped=a.finish is Finish.STOP and isinstance(a.stop, int)) for a in answers]
    count = sum(sign is not None for sign in signs)
    return {"degenerate": count, "claim_is_void": void(len(answers), count)}


def _ratio(units: Sequence[Unit], cell: Cell, plain: Cell) -> Ratio | None:
    whole = paired_ratio(*([_seconds(unit.turns[c]) for unit in units] for c in (cell, plain)))
    turns = paired_ratio(*([_seconds([turn]) for unit in units for turn in unit.turns[c]] for c in (cell, plain)))
    if whole is None or turns is None or len(units) >= MIN_UNITS:
        return whole
    return replace(whole, low=turns.low, high=turns.high, units=turns.units)


def _seconds(turns: Sequence[Turn]) -> tuple[float, float]:
    """Tokens of a unit and its median seconds."""
    return turns[0].tokens, statistics.median(turn.seconds for turn in turns)


def _speed(units: Sequence[Unit], cell: Cell) -> float | None:
    pairs = [_seconds(unit.turns[cell]) for unit in units]
    seconds = sum(pair[1] for pair in pairs)
    return sum(pair[0] for pair in pairs) / seconds if seconds else None


HEADER = (
    "batch", "T", "drafter", "draft", "plain tok/s", "spec tok/s", "ratio", "tokens/step", "accepted", "same text",
    *(f"{part} ms" for part in PARTS),
)  # fmt: skip  # a field a line would hide what belongs together


def text(found: Record) -> str:
    machine = found["machine"]
    facts = f"{machine.get('gpu') or machine['cpu']} · paceline {machine['paceline']} ({machine['commit']})"
    lines = [
        f"{found['target']} · {', '.join(found['sources'])} · {facts}",
        table([HEADER, *map(row, found["cells"])]),
    ]
    lines += [_by_category(cell) for cell in found["cells"] if len(cell["categories"]) > 1]
    void_cells = [cell for cell in found["cells"] if cell["claim_is_void"]]
    if void_cells:
        worst = max(cell["degenerate"] for cell in void_cells)
        lines.append(f"Up to {worst} answers loop or repeat themselves: no speed of such text means anything.")
    return "\n\n".join([*lines, found["definition"], found["conclusion"]])


def row(cell: Record) -> tuple[str, ...]:
    ratio = {"ratio": cell["ratio"], "interval": cell["ratio_interval"]}
    return (
        str(cell["batch"]),
        f"{cell['temperature']:g}",
        cell["drafter"],
        "" if cell["max_draft"] is None else f"≤{cell['max_draft']}",
        number(cell["plain_tok_s"], ".1f"),
        number(cell["speculative_tok_s"], ".1f"),
        "" if cell["ratio"] is None else ratio_text(ratio),
        f"{tokens_per_step(cell):.2f}",
        number(cell["acceptance"], ".0%"),
        f"{cell['identical']}/{cell['prompts']}",
        *(number(cell["speculative_ms_per_step"][part], ".2f") for part in PARTS),
    )


def _by_category(cell: Record) -> str:
    head = f"batch {cell['batch']}, T={cell['temperature']:g}, {cell['drafter']}"
    rows = [
        (
            name,
            str(each["prompts"]),
            ratio_text(each) if "ratio" in each else "",
            f"{tokens_per_step(each):.2f}",
            number(each["acceptance"], ".0%"),
        )
        for name, each in cell["categories"].items()
    ]
    return table([(head, "prompts", "ratio", "tokens/step", "accepted"), *rows])
