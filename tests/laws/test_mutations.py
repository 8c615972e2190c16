"""Turning any comparison of the acceptance code must be noticed by a compact set of checks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from paceline.accept import AcceptRule, Outcome, Verification
from paceline.accept.rule import Judge
from paceline.draft import Draft
from paceline.types import Request, Rule, SamplingParams, Speculation
from tests.accept.checks import CHECKS
from tests.engine.filtered_draws import check_best_tokens, check_filters, check_grammars
from tests.laws import mutants, under_law
from tests.odd_drafters import Scripted
from tests.outside import registered
from tests.rig import build
from tests.rig_drafters import RIGS, always
from tests.runs import Key, plain, prompt, run, tokens_of

# Mutants that no check can tell from the original, and why.
EQUIVALENT = {
    "reach < rows.depth  →  reach <= rows.depth": "one turn more looks above the root, which is alive anyway",
}

MUTANTS = [(name, what, source) for name in mutants.MODULES for what, source in mutants.mutants(name)]


def requests() -> list[Request]:
    """Greedy and seeded, all lossless rules, one without a draft: all that judge tells apart."""
    return [
        Request(
            id=str(i),
            prompt=prompt(3 + i, seed=i),
            sampling=SamplingParams(temperature=i % 2, seed=i, max_tokens=10),
            speculation=Speculation(rule=under_law.LOSSLESS[i // 2 % 3], enabled=i < 6),
        )
        for i in range(7)
    ]


def strict_requests(*, threshold: float = 1.0) -> list[Request]:
    """By a lossy rule, with a threshold that nothing but the target's own token reaches, or another."""
    strict = Speculation(rule=Rule.THRESHOLD, threshold=threshold)
    sampling = SamplingParams(temperature=1, seed=3, n=8, max_tokens=20)
    return [Request(id="strict", prompt=(5, 6), sampling=sampling, speculation=strict)]


@functools.cache
def expected() -> dict[Key, list[int]]:
    return tokens_of(run(build("toy"), plain(requests())))


@functools.cache
def strictly_expected() -> dict[Key, list[int]]:
    return tokens_of(run(build("toy"), plain(strict_requests())))


class Sometimes(Scripted):
    """Distributions for the rejection rule, but only in greedy requests: there it must agree with plain tokens."""

    def propose(self, asks: Sequence) -> list[Draft]:
        return [
            Draft(draft.tokens) if ask.rule.wants_probs and not ask.sampler.greedy else draft
            for ask, draft in zip(asks, super().propose(asks), strict=True)
        ]


def check_engine(code: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("paceline.engine.host.judge", code.judge)
        scripts = [[*request.prompt, *expected()[request.id, 0]] for request in requests()]
        for made in (Sometimes(scripts, probs=True), Scripted(scripts, tree=True, seed=3)):
            rig = build("toy", {"scripted": always(made)})
            assert tokens_of(run(rig, requests())) == expected()
            assert rig.engine.stats.accepted > 10
        rig = build("toy", {"noisy": RIGS["model"]["noisy"]})
        assert tokens_of(run(rig, strict_requests())) == strictly_expected()
        assert 10 < rig.engine.stats.accepted < rig.engine.stats.drafted
        rig = build("toy", {"noisy": RIGS["model"]["noisy"]})
        run(rig, strict_requests(threshold=1e-30))
        assert rig.engine.stats.accepted == rig.engine.stats.drafted > 10
        check_rules_from_outside(code, scripts)


def check_rules_from_outside(code: SimpleNamespace, scripts: list[list[int]]) -> None:
    """A sound one is asked in every round, a broken one once, and neither changes the text."""
    rounds = asked_from_outside(code, scripts, lambda given: judge_as_coupled(code, given))
    assert asked_from_outside(code, scripts, lambda given: None) == 1 < rounds


def asked_from_outside(code: SimpleNamespace, scripts: list[list[int]], judge: Judge) -> int:
    """How often the engine asks a rule, in a run that must give the plain text."""
    calls = []

    def watched(given: Verification) -> Outcome:
        calls.append(given)
        return judge(given)

    with registered(AcceptRule(name="theirs", judge=watched, lossless=True), by=code.register) as rule:
        rig = build("toy", {"scripted": always(Scripted(scripts, tree=True, seed=3))})
        asked = [replace(each, speculation=replace(each.speculation, rule=rule)) for each in requests()]
        assert tokens_of(run(rig, asked)) == expected()
        assert rig.engine.stats.accepted > 10
    return len(calls)


def judge_as_coupled(code: SimpleNamespace, given: Verification) -> Outcome:
    alive, last = code.walk(given.rows, given.rows.tokens == given.targets[given.rows.parents])
    outcome: Outcome = code.Outcome(alive=alive, last=last, tokens=given.targets[last])
    return outcome


def noticed(code: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> bool:
    try:
        for check in CHECKS:
            check(code)
        check_best_tokens(code.judge)
        check_grammars(code.judge)
        check_filters(code.judge, SamplingParams(temperature=1, top_k=3), seeds=40)
        check_engine(code, monkeypatch)
    except Exception:
        return True
    return False


def test_the_original_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not noticed(mutants.load({}), monkeypatch)


def test_there_is_something_to_turn() -> None:
    assert {name for name, _, _ in MUTANTS} == set(mutants.MODULES)
    assert EQUIVALENT.keys() <= {what for _, what, _ in MUTANTS}, "an equivalent mutant that no longer exists"


@pytest.mark.parametrize(("name", "what", "source"), MUTANTS, ids=[what for _, what, _ in MUTANTS])
@pytest.mark.filterwarnings("ignore")  # a mutant may warn as it likes: what counts is that it is noticed
def test_every_turned_comparison_is_noticed(
    name: str, what: str, source: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")
    assert noticed(mutants.load({name: source}), monkeypatch) == (what not in EQUIVALENT)
