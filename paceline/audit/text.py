"""The record of an audit as text: a table of cases, tests, differences, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.audit.degeneration import MAX_DEGENERATE_SHARE
from paceline.audit.differences import DifferenceKind

Record = dict[str, Any]
MAX_DIFFERENCES = 20  # shown at most; the record has all
WORD_COLUMNS = 4  # first columns, aligned to the left; the others are numbers
HEADER = (
    "drafter", "rule", "at once", "sampling", "answers", "identical", "near-tie", "structural", "drafted", "accepted",
    "tokens/step", "degenerate",
)  # fmt: skip  # a field a line would hide what belongs together


def text(found: Record) -> str:
    lines = [found["near_tie_bound"], "", *_table([HEADER, *(case_row(case) for case in found["cases"])])]
    if found["distribution"]:
        lines += ["", *map(test_line, found["distribution"])]
    lines += _difference_lines(found)
    if found["lossy"]:
        rules, answers, changed = (found["lossy"][name] for name in ("rules", "answers", "changed"))
        lines += ["", f"LOSSY by {' and '.join(rules)}: {changed} of {answers} answers changed"]
        lines += [loss_line(case) for case in found["cases"] if case["loss"]]
    if found["degenerate"]:
        lines += ["", degenerate_line(found)]
    if found["not_audited"]:
        lines += ["", found["not_audited"]]
    return "\n".join([*lines, "", found["verdict"]])


def degenerate_line(found: Record) -> str:
    many = f"more than {MAX_DEGENERATE_SHARE:.0%} of the answers of a case: a speed measured on them is VOID"
    note = many if found["speed_claim"] == "void" else "few enough for a speed to be measured on them"
    return f"degenerate answers (loops, repeated n-grams, truncated) to {found['degenerate']} prompts; {note}"


def loss_line(case: Record) -> str:
    """Tell what a lossy rule changed in one case."""
    lost = case["loss"]
    said = f"{case['drafter']}, {how(case)}, {case['at_once']} at once, {case['sampling']}: "
    said += f"{lost['changed']} of {lost['answers']} answers changed"
    if lost["first_difference"] is not None:
        said += f", half of them by token {lost['first_difference'] + 1:g}"
    return (
        f"{said}; log-probability of a token {lost['logprob']:.3f}, plain {lost['plain_logprob']:.3f}: perplexity "
        f"× {lost['perplexity_ratio']:.2f}; {case['tokens_per_step']:.2f} tokens per step"
    )


def how(case: Record) -> str:
    """Rule and threshold of a case."""
    rule, threshold = case["rule"] or "", case["threshold"]
    return rule if threshold is None else f"{rule} {threshold}"


def case_row(case: Record) -> tuple[str, ...]:
    exact = case["promise"] == "tokens" or case["compared"]
    by_tokens = (str(case["identical"]), str(case["near_tie"]), str(case["structural"]))
    test = "by test" if case["tested"] else "NOT TESTED"
    other = {"reference": "—", "distribution": test, "lossy": "LOSSY"}.get(case["promise"], "—")
    return (
        case["drafter"] or "plain",
        how(case),
        str(case["at_once"]),
        case["sampling"],
        str(case["answers"]),
        *(by_tokens if exact else (other, "", "")),
        str(case["drafted"]),
        str(case["accepted"]),
        f"{case['tokens_per_step']:.2f}",
        str(case["degenerate"]),
    )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i < WORD_COLUMNS else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def test_line(test: Record) -> str:
    name = f"distribution, {test['drafter']}, {test['rule']}, {test['sampling']}"
    if not test["proves"]:
        return f"{name}: NOT TESTED, nothing was drafted at the places chosen"
    found = f"{test['places']} places × {test['samples']} seeds, p = {test['p_value']:.2g}"
    power = f"a shift of {test['shift']:.1%} of probability is found with {test['power']:.0%}"
    if not test["failed"]:
        return f"{name}: passes ({found}; {power})"
    worst = test["worst"]
    cell = f"{worst['tokens']} {worst['text']!r} {worst['counted']} times where {worst['expected']:.1f} are expected"
    return f"{name}: FAILS ({found}); worst: prompt {worst['prompt']}, token {worst['position']}: {cell}"


def _difference_lines(found: Record) -> list[str]:
    ordered = sorted(found["differences"], key=lambda difference: difference["kind"] != DifferenceKind.STRUCTURAL)
    lines = [difference_line(difference) for difference in ordered[:MAX_DIFFERENCES]]
    if len(ordered) > MAX_DIFFERENCES:
        lines.append(f"… and {len(ordered) - MAX_DIFFERENCES} more: see --json or --html")
    return ["", *lines] if lines else []


def difference_line(found: Record) -> str:
    how = "plain" if found["drafter"] is None else f"{found['drafter']}, {found['rule']}"
    gap = "no gap in logits"
    if found["gap"] is not None:
        gap = f"gap {found['gap']:.4g} logits, near-tie up to {found['bound']:.2g}"
    return (
        f"{found['kind'].replace('_', '-').upper()} prompt {found['prompt_number']} ({found['prompt']}), {how}, "
        f"{found['at_once']} at once, {found['sampling']}: token {found['position'] + 1} of the answer, "
        f"step {found['step']}, place {found['place'] + 1} ({found['origin'] or 'end'}): "
        f"plain {_token(found, 'plain')}, replayed {_token(found, 'replayed')}, "
        f"asked anew {_token(found, 'expected')}; {gap}; {found['reason']}"
    )


def _token(found: Record, which: str) -> str:
    return "nothing" if found[which] is None else f"{found[which]} {found[f'{which}_text']!r}"
