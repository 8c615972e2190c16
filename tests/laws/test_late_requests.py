"""Laws 1, 2 and 7 for latency targets: a request that is always late drafts where its batch must not. No text changes
by that, neither its own nor those beside it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest

from paceline.types import Request, Rule
from tests.laws import test_law_7_parameters as law_7
from tests.laws import under_law
from tests.rig import Rig
from tests.rig import build as build_engine
from tests.rig_drafters import Made
from tests.runs import Key, Run, Told, tokens_of

NEVER = 1e-9  # a target in seconds that no answer keeps to
BY_COST = {"measure_cost": True, "max_draft_batch": None}  # what rows cost is never measured: several must not draft
DRAFTERS = ("noisy", "eagle", "ngram-1", "suffix", "portfolio", "lookahead", "tree", "chain")


def run(rig: Rig, requests: list[Request]) -> tuple[Mapping[Key, Told], int]:
    """Run requests, of which every fourth has a target that it misses. Return what became of them, and how many tokens
    were drafted in steps in which nobody else might."""
    clock = itertools.count()
    rig.engine._clock = rig.engine._accounting._clock = lambda: float(next(clock))
    late = [
        replace(each, speculation=replace(each.speculation, target_tpot=NEVER)) if i % 4 == 0 else each
        for i, each in enumerate(requests)
    ]
    going, granted = Run(rig), 0
    going.submit(late)
    while rig.engine.has_work:
        before = rig.engine.stats.drafted
        going.step()
        if rig.engine._governor.grants.unguarded:
            granted += rig.engine.stats.drafted - before
    return going.finish(), granted


def build(name: str, made: Made, law: str) -> Rig:
    if law == "parameters":
        return law_7.engine("toy", {name: made}, **BY_COST)
    return build_engine("toy", {name: made}, **BY_COST)


@pytest.mark.parametrize("law", ["greedy", "sampled"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_laws_1_and_2(name: str, law: str) -> None:
    rules = under_law.LOSSLESS if law == "greedy" else (Rule.COUPLED,)
    rig = build(name, under_law.made(name, "toy", law), law)
    told, granted = run(rig, under_law.asked(name, "toy", law, rules))
    assert tokens_of(told) == tokens_of(under_law.plain_answers("toy", law))
    assert granted > 0


@pytest.mark.parametrize("name", ["noisy", "ngram-1", "chain", "tree"])
def test_law_7(name: str) -> None:
    expected = law_7.expected("toy")
    scripts = [[*law_7.asked()[int(i)].prompt, *each.tokens] for (i, _), each in expected.items()]
    made = under_law.REGISTERED[name] if name in under_law.REGISTERED else under_law.scripted(name, scripts)
    told, granted = run(build(name, made, "parameters"), law_7.asked())
    law_7.assert_same(told, expected)
    assert granted > 0
    assert {each.stats.target_met for each in told.values()} == {False, None}
