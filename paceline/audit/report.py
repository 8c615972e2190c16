"""The findings of an audit as a record for programs; `text` and `page` show it to people.

Answers of a lossy rule are called lossy, never identical.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from paceline.audit.differences import DifferenceKind
from paceline.audit.distribution import POWER, Tested
from paceline.audit.run import Case, Findings, Judged

Record = dict[str, Any]
Show = Callable[[Sequence[int]], str]  # tokens as text
CONTEXT_TOKENS = 24  # tokens of the answer shown before a difference


def record(found: Findings, *, show: Show) -> Record:
    worst = found.prompts_by_worst()
    return {
        "prompts": len(found.prompts),
        "identical": worst[None],
        "near_tie": worst[DifferenceKind.NEAR_TIE],
        "structural": worst[DifferenceKind.STRUCTURAL],
        "degenerate": found.degenerate_prompts,
        "distribution_failed": sum(test.failed for test in found.tests),
        "lossy": _lossy(found),
        "passed": found.passed,
        "interrupted": found.interrupted,
        "verdict": verdict(found),
        "speed_claim": "void" if found.claim_is_void else "sound",
        "bitwise": found.arithmetic.bitwise,
        "near_tie_bound": found.arithmetic.rule,
        "answers": _answers(found),
        "drafted": found.drafted,
        "accepted": sum(case.accepted for case in found.cases),
        "cases": [_case(case, found.tests) for case in found.cases],
        "distribution": [_test(found, test, show) for test in found.tests],
        "differences": [_difference(found, case, judged, show) for case, judged in found.differences],
        "degenerate_answers": [
            _degenerate(found, case, judged, show)
            for case in found.cases
            for judged in case.judged
            if judged.degenerate is not None
        ],
    }


def verdict(found: Findings) -> str:
    """The verdict of an audit in one line."""
    said = _verdict(found)
    return f"INTERRUPTED, so far {said}" if found.interrupted else said


def _verdict(found: Findings) -> str:
    answers = _answers(found)
    counted = f"{answers['identical']} of {answers['compared']} answers are identical to plain decoding"
    failed = [test for test in found.tests if test.failed]
    if found.structural:
        return f"CHANGED: {counted}; {answers['structural']} differ by more than arithmetic, which is a bug"
    if failed:
        return f"CHANGED: {len(failed)} of {len(found.tests)} distribution tests fail; {counted}"
    if not answers["compared"]:
        return "NOTHING COMPARED: every rule was lossy, so that no answer had to be identical to plain decoding"
    if not found.drafted:
        return f"NOTHING SHOWN: {counted}, but no token was drafted"
    if answers["near_tie"]:
        return f"EXACT BUT FOR NEAR-TIES: {counted}; {answers['near_tie']} differ where arithmetic decides"
    shown = [test for test in found.tests if test.proves]
    return f"EXACT: {counted}" + (f"; {len(shown)} distribution tests pass" if shown else "")


def _answers(found: Findings) -> Record:
    compared = sum(case.exact for case in found.cases)
    kinds = {kind.value: sum(case.of_kind(kind) for case in found.cases) for kind in DifferenceKind}
    return {"compared": compared, "identical": compared - sum(kinds.values()), **kinds}


def _lossy(found: Findings) -> Record | None:
    cases = [case for case in found.cases if not case.group.rule.lossless]
    if not cases:
        return None
    rules = sorted({case.group.how for case in cases})
    answers = sum(len(case.judged) for case in cases)
    return {"rules": rules, "answers": answers, "changed": answers - sum(case.same for case in cases)}


def _loss(case: Case) -> Record | None:
    found = case.loss
    if found is None:
        return None
    lost = found.plain_logprob - found.logprob
    return asdict(found) | {"lost_logprob": lost, "perplexity_ratio": math.exp(min(lost, 50.0))}


def _case(case: Case, tests: Sequence[Tested]) -> Record:
    group = case.group
    per_step, per_step_sound = (round(case.tokens_per_step(sound_only=sound), 3) for sound in (False, True))
    return {
        "drafter": group.drafter,
        "rule": None if group.drafter is None else str(group.rule),
        "threshold": group.threshold,
        "at_once": group.at_once,
        "sampling": case.variant,
        "promise": _promise(case),
        "tested": any(_belongs(test, case) for test in tests if test.proves),
        "answers": len(case.judged),
        "compared": case.exact,
        "identical": case.exact - sum(case.of_kind(kind) for kind in DifferenceKind),
        "near_tie": case.of_kind(DifferenceKind.NEAR_TIE),
        "structural": case.of_kind(DifferenceKind.STRUCTURAL),
        "changed": len(case.judged) - case.same,
        "drafted": case.drafted,
        "accepted": case.accepted,
        "tokens_per_step": per_step,
        "tokens_per_step_without_degenerate": per_step_sound,
        "tokens_per_round": per_step,  # the older name, as is the next
        "tokens_per_round_without_degenerate": per_step_sound,
        "loss": _loss(case),
        "degenerate": case.degenerate,
        "cut": case.cut,
        "off_reasons": case.off_reasons,
    }


def _promise(case: Case) -> str:
    if not case.group.rule.lossless:
        return "lossy"
    if case.is_reference:
        return "reference"
    return "tokens" if case.exact == len(case.judged) else "distribution" if not case.exact else "tokens where greedy"


def _belongs(test: Tested, case: Case) -> bool:
    return (test.drafter, test.rule, test.sampling) == (case.group.drafter, case.group.rule, case.variant)


def _where(found: Findings, case: Case, judged: Judged) -> Record:
    return {
        "prompt": found.prompts[judged.item.prompt].id,
        "prompt_number": judged.item.prompt + 1,
        "drafter": case.group.drafter,
        "rule": None if case.group.drafter is None else str(case.group.rule),
        "at_once": case.group.at_once,
        "sampling": case.variant,
        "seed": judged.item.request.sampling.seed,
    }


def _difference(found: Findings, case: Case, judged: Judged, show: Show) -> Record:
    difference = judged.difference
    assert difference is not None
    said = {
        name: None if token is None else show([token])
        for name, token in (
            ("plain_text", difference.plain),
            ("replayed_text", difference.replayed),
            ("expected_text", difference.expected),
        )
    }
    before = judged.plain.tokens[max(0, difference.position - CONTEXT_TOKENS) : difference.position]
    facts = asdict(difference) | {"gap": _finite(difference.gap), "round": difference.step}  # the older name
    return _where(found, case, judged) | facts | said | {"before": show(before)}


def _degenerate(found: Findings, case: Case, judged: Judged, show: Show) -> Record:
    tokens = judged.answer.tokens
    facts = {"sign": judged.degenerate, "tokens": len(tokens), "end": show(tokens[-CONTEXT_TOKENS:])}
    return _where(found, case, judged) | facts


def _test(found: Findings, test: Tested, show: Show) -> Record:
    facts = asdict(test) | {"failed": test.failed, "proves": test.proves, "power": POWER}
    if test.worst is not None:
        worst = asdict(test.worst) | {"off": _finite(test.worst.off)}
        facts["worst"] = worst | {"prompt": found.prompts[test.worst.prompt].id, "text": show(test.worst.tokens)}
    return facts


def _finite(value: float) -> float | None:
    """None for an infinite value, which JSON does not have."""
    return value if math.isfinite(value) else None
