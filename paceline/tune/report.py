"""Results of a study: a record for programs, and sentences in plain words. `tune.shown` has tables and the page.

Predicted and measured figures stand side by side, so that a reader sees how far predictions hold.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from paceline.audit.degeneration import void
from paceline.bench.grid_record import timed_rounds
from paceline.bench.statistics import paired_ratio
from paceline.tune import pairs
from paceline.tune.choice import Choice, Measured, Slo, choose, nearest
from paceline.tune.predictions import Prediction
from paceline.tune.ways import DEFAULT, PLAIN

Record = dict[str, Any]
DEFINITION = (
    "ratio: tokens a second by those of plain decoding, after every request of a batch has its first token, with 95 % "
    "intervals; predicted: rounds of the recorded answers by measured seconds of steps; TTFT, TPOT: medians of answers"
)
CLOSE = 0.1  # relative error of a prediction that counts as right


def measured_of(checks: Sequence[Record]) -> list[Measured]:
    """Summarise what was measured, a way and a batch size each. Rounds without a second token tell nothing."""
    found = []
    for each in checks:
        rounds = timed_rounds(each)
        for drafter, draft, title in each["named"] if rounds else ():
            arm, plain = (each["arms"][name] for name in (title, PLAIN))
            turns, beside = ([(a["tokens"][i], a["seconds"][i]) for i in rounds] for a in (arm, plain))
            ratio = paired_ratio(turns, beside)
            assert ratio is not None, "there are rounds"
            found.append(
                Measured(
                    group=each["group"],
                    drafter=drafter,
                    draft=draft,
                    batch=each["batch"],
                    tok_s=sum(tokens for tokens, _ in turns) / sum(seconds for _, seconds in turns),
                    ratio=ratio.value,
                    interval=None if ratio.low is None or ratio.high is None else (ratio.low, ratio.high),
                    ttft=statistics.median(arm["ttft"]),
                    tpot=statistics.median(arm["tpot"]),
                    void=void(each["answers"], each["degenerate"]),
                )
            )
    return found


def record(
    predictions: Sequence[Prediction],
    measured: Sequence[Measured],
    *,
    slos: Sequence[Slo],
    titles: Sequence[str],
    pairs: Sequence[Record] = (),
    failed: Mapping[str, str],
    left_out: Sequence[str],
    facts: Mapping[str, Any],
) -> Record:
    """Return all results. `titles`: the drafters of each engine, by its number."""
    choice = choose(measured, slos)
    cells = [_cell(each, titles) for each in _distinct(measured)]
    predicted = [{**each.record(), "way": _way(each.drafter, each.draft)} for each in predictions]
    found = {
        "benchmark": "tune",
        "definition": DEFINITION,
        **facts,
        "predictions": predicted,
        "cells": cells,
        "errors": _errors(predicted, cells),
        "slo": [str(slo) for slo in slos],
        "choice": None if choice is None else {**asdict(choice), "way": _choice_way(choice, titles)},
        "pairs": list(pairs),
        "failed": dict(failed),
        "left_out": list(left_out),
    }
    return found | {"conclusion": _conclusion(choice, measured, slos, titles), "words": words_of(found)}


def _distinct(measured: Sequence[Measured]) -> list[Measured]:
    """Leave out plain decoding in other engines than the first that was measured at its batch size."""
    first: dict[Any, Measured] = {}
    for each in measured:
        first.setdefault((each.batch, each.way), each)
    return list(first.values())


def _way(drafter: str, draft: int | None) -> str:
    return drafter if draft is None else f"{drafter} k={draft}"


def _cell(each: Measured, titles: Sequence[str]) -> Record:
    way = _way(each.drafter, each.draft)
    if each.drafter == DEFAULT and each.group:
        way = f"{DEFAULT} with {titles[each.group]}"
    return {**asdict(each), "way": way}


def _choice_way(choice: Choice, titles: Sequence[str]) -> str:
    with_others = choice.drafter == DEFAULT and choice.group
    return f"{DEFAULT} with {titles[choice.group]}" if with_others else _way(choice.drafter, choice.draft)


def _errors(predicted: Sequence[Record], cells: Sequence[Record]) -> Record | None:
    """Compare predictions with what was measured; None: nothing can be compared."""
    by_place = {(each["batch"], each["way"]): each for each in predicted}
    pairs = [(by_place[key], cell) for cell in cells if (key := (cell["batch"], cell["way"])) in by_place]
    if not pairs:
        return None
    ratios = [made["ratio"] / cell["ratio"] - 1 for made, cell in pairs]
    return {"cells": len(pairs), "close": sum(abs(each) <= CLOSE for each in ratios), "errors": ratios}


def words_of(found: Record) -> list[str]:
    """Say what each way brings, a line for each batch size."""
    said = []
    for batch in sorted({cell["batch"] for cell in found["cells"]}):
        mine = [cell for cell in found["cells"] if cell["batch"] == batch and cell["drafter"] != PLAIN]
        told = "; ".join(_told(cell) for cell in sorted(mine, key=lambda cell: -float(cell["ratio"])))
        said.append(f"{batch} at once: {told}.")
    if any(cell["void"] for cell in found["cells"]):
        said.append("Too many answers loop or repeat themselves: no speed of such text means anything.")
    errors = found["errors"]
    if errors is not None:
        said.append(f"{errors['close']} of {errors['cells']} predictions are within {CLOSE:.0%} of what was measured.")
    said += [f"{title}: left out, {why}" for title, why in found["failed"].items()]
    if found["left_out"]:
        said.append(f"The time was over before: {'; '.join(found['left_out'])}.")
    return said


def _told(cell: Record) -> str:
    change = cell["ratio"] - 1
    if cell["ratio"] >= 1.2:
        return f"{cell['way']}: {cell['ratio']:.2f}x{pairs.spoken(cell['interval'])}"
    return f"{cell['way']}: {abs(change):.0%} {'faster' if change >= 0 else 'slower'}{pairs.spoken(cell['interval'])}"


def _conclusion(choice: Choice | None, measured: Sequence[Measured], slos: Sequence[Slo], titles: Sequence[str]) -> str:
    if not measured:
        return "Nothing was measured that could be compared."
    limits = " and ".join(map(str, slos))
    if choice is None:
        near = nearest(measured, slos)
        times = f"TTFT {near.ttft * 1e3:.0f} ms, TPOT {near.tpot * 1e3:.1f} ms"
        way = _way(near.drafter, near.draft)
        return f"Nothing keeps to {limits}: {way} with {near.batch} at once comes nearest ({times})."
    within = f" Within {limits}, at most {choice.max_sequences} at once." if slos else ""
    beyond = "" if choice.max_draft_batch is None else f" With more than {choice.max_draft_batch} at once it is plain."
    way = _choice_way(choice, titles)
    return f"Choice: {way}, {choice.speed:.2f} times plain speed in the mean: {choice.why}.{within}{beyond}"
