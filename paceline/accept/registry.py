"""The judges of all rules by name: Paceline's own rules, registered ones, and those of plug-ins.

The coupled rule is not among them: `accept_coupled` judges it in plain Python. Rules of other packages are not
trusted: one that raises, or returns an invalid outcome, is out of use from then on, and replaced by the coupled rule.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline import plugins, rules
from paceline.accept.block import accept_block
from paceline.accept.lossy import accept_likely, accept_needed, needed_by_confidence, typical_floors
from paceline.accept.outside import problem_of
from paceline.accept.rejection import accept_rejection
from paceline.accept.rows import Outcome
from paceline.accept.rule import AcceptRule, Judge, Verification
from paceline.rules import Rule

logger = logging.getLogger(__name__)


def judge_rejection(given: Verification) -> Outcome:
    return accept_rejection(given.rows, given.p, given.q, given.coins, given.noise)


def judge_block(given: Verification) -> Outcome:
    return accept_block(given.rows, given.p, given.q, given.round_coins, given.noise)


def judge_threshold(given: Verification) -> Outcome:
    return accept_likely(given.rows, given.targets, given.likelihood, _thresholds(given))


def judge_typical(given: Verification) -> Outcome:
    floors = typical_floors(given.likelihood, _thresholds(given))
    return accept_likely(given.rows, given.targets, given.likelihood, floors)


def judge_confidence(given: Verification) -> Outcome:
    needed = needed_by_confidence(given.confidence, _thresholds(given))
    return accept_needed(given.rows, given.targets, given.likelihood, needed)


def _thresholds(given: Verification) -> Tensor:
    """Return the threshold of each row."""
    return torch.as_tensor(given.thresholds, dtype=torch.float32)[given.rows.owners]


JUDGES: Mapping[Rule, Judge] = {
    Rule.REJECTION: judge_rejection,
    Rule.BLOCK: judge_block,
    Rule.THRESHOLD: judge_threshold,
    Rule.TYPICAL: judge_typical,
    Rule.CONFIDENCE: judge_confidence,
}
_registered: dict[str, AcceptRule] = {}
_out_of_use: set[str] = set()  # rules of other packages that failed


def register(rule: AcceptRule) -> Rule:
    """Make a rule known to this process: from now on requests can ask for it by its name."""
    known = rules.define(
        rule.name,
        lossless=rule.lossless,
        wants_probs=rule.wants_probs,
        threshold=rule.threshold,
        devices=rule.devices,
    )
    _registered[rule.name] = rule
    return known


def judged_by(rule: Rule, given: Verification) -> Outcome | None:
    """Judge by a rule. None: a rule of another package failed, and its drafts must be judged as coupled."""
    own = JUDGES.get(rule)
    return own(given) if own is not None else _judged_outside(rule, given)


def in_use(rule: Rule) -> Rule:
    """Return the rule that drafts are judged by: the given one, or the coupled rule if that one is out of use."""
    return Rule.COUPLED if rule in _out_of_use else rule


def _judged_outside(rule: Rule, given: Verification) -> Outcome | None:
    if rule in _out_of_use:
        return None
    found: Any = _registered.get(rule) or plugins.load(plugins.RULES, rule)
    raised: Exception | None = None
    try:
        outcome: Outcome = found.judge(given)
        problem = problem_of(outcome, given)
    except Exception as error:  # another package's code: it must not end the engine
        problem, raised = f"it raised {error!r}", error
    if problem is None:
        return outcome
    _out_of_use.add(rule)
    logger.error("the rule %s is out of use, drafts are judged as coupled instead: %s", rule, problem, exc_info=raised)
    return None
