"""The lossy rules in the engine: they accept more, but nothing ruled out, and never on a device."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.draft import Draft
from paceline.rules import BUILT_IN
from paceline.types import Grammar, Request, Rule, SamplingParams, Speculation
from tests.odd_drafters import Scripted
from tests.rig import Rig, build
from tests.rig_drafters import RIGS, always, model_drafter
from tests.runs import Key, Told, run, tokens_of
from tests.tiny_models import TARGET, Model, tiny_tokenizer

LOSSY = [rule for rule in BUILT_IN if not rule.lossless]


class Nines(Scripted):
    """Proposes nothing but token 9."""

    def __init__(self) -> None:
        super().__init__([], wrong=0.0)

    def _next(self, tokens: np.ndarray) -> list[int]:
        return [9] * 60


class Sure(Nines):
    """Says how sure it is of its nines."""

    def __init__(self, own: float) -> None:
        super().__init__()
        self._own = own

    def _draft(self, truth: list[int], longest: int) -> Draft:
        return Draft((9,) * longest, confidence=tuple(self._own ** (1 + i) for i in range(longest)))


DIFFERENT = model_drafter(Model(noise=0.5))


def ask(speculation: Speculation, *, temperature: float = 1.0, **more: object) -> Request:
    sampling = SamplingParams.of(temperature=temperature, seed=1, n=4, max_tokens=40, **more)
    return Request(id="r", prompt=(3, 1, 4), sampling=sampling, speculation=speculation)


def answered(rule: Rule, *, threshold: float | None = None, **more: object) -> tuple[Rig, dict[Key, Told]]:
    rig = build("toy", {"different": DIFFERENT}, min_acceptance=0.0)
    return rig, run(rig, [ask(Speculation(rule=rule, threshold=threshold), **more)])


def test_which_rules_are_lossy() -> None:
    assert LOSSY == [Rule.THRESHOLD, Rule.TYPICAL, Rule.CONFIDENCE]


@pytest.mark.unwatched
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", LOSSY)
def test_more_is_accepted_than_the_target_would_have_said(rule: Rule, temperature: float) -> None:
    exact, said = answered(Rule.COUPLED, temperature=temperature)
    lossy, other = answered(rule, threshold=0.02, temperature=temperature)
    assert lossy.engine.stats.accepted / lossy.engine.stats.drafted > 1.2 * (
        exact.engine.stats.accepted / exact.engine.stats.drafted
    )
    assert tokens_of(said) != tokens_of(other)


@pytest.mark.parametrize("rule", LOSSY)
def test_a_lower_threshold_accepts_more(rule: Rule) -> None:
    rates = []
    for threshold in (0.9, 0.1, 0.001):
        rig, _ = answered(rule, threshold=threshold)
        rates.append(rig.engine.stats.accepted / rig.engine.stats.drafted)
    assert rates == sorted(rates)
    assert rates[0] < rates[2]


@pytest.mark.parametrize("rule", LOSSY)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_ruled_out_stays_out(rule: Rule, temperature: float) -> None:
    """Token 9 is not allowed, though the target holds it for possible."""
    allowed = tuple(token for token in range(97) if token != 9)
    rig = build("toy", {"nines": always(Nines())}, min_acceptance=0.0)
    told = run(rig, [ask(Speculation(rule=rule, threshold=1e-6), temperature=temperature, allowed_tokens=allowed)])
    assert rig.engine.stats.drafted > 0
    assert all(9 not in tokens for tokens in tokens_of(told).values())


def test_an_unlikely_draft_that_will_do_is_taken() -> None:
    """The same drafter, with nothing forbidden: what is said is what it proposes."""
    rig = build("toy", {"nines": always(Nines())}, min_acceptance=0.0)
    told = run(rig, [ask(Speculation(rule=Rule.THRESHOLD, threshold=1e-6), temperature=0.0)])
    assert any(tokens.count(9) > 10 for tokens in tokens_of(told).values())


@pytest.mark.parametrize("rule", LOSSY)
def test_a_grammar_is_kept(rule: Rule) -> None:
    rig = build("toy", {"different": DIFFERENT}, tokenizer=tiny_tokenizer(), eos_ids=(0,))
    told = run(rig, [ask(Speculation(rule=rule, threshold=1e-6), grammar=Grammar.regex("(ab|ac)+d"))])
    for each in told.values():
        assert set(each.text) <= set("abcd")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_device_runs_them(temperature: float) -> None:
    rig = build("toy", {"good": RIGS["model"]["good"]}, on_device={"good": TARGET})
    run(rig, [ask(Speculation(rule=Rule.TYPICAL), temperature=temperature)])
    assert rig.rounds.launches == rig.engine.stats.steps
    assert rig.engine.stats.accepted > 0


def test_the_default_threshold_is_the_rule_s() -> None:
    for rule, threshold in ((Rule.THRESHOLD, 0.3), (Rule.TYPICAL, 0.09), (Rule.CONFIDENCE, 0.3)):
        _, said = answered(rule)
        _, same = answered(rule, threshold=threshold)
        assert tokens_of(said) == tokens_of(same)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_sure_drafter_is_believed_more(temperature: float) -> None:
    """Nines are said as often as their drafter is sure of them, and as by a threshold if it does not say."""

    def nines(drafter: Nines, rule: Rule = Rule.CONFIDENCE) -> int:
        rig = build("toy", {"nines": always(drafter)}, min_acceptance=0.0)
        told = run(rig, [ask(Speculation(rule=rule, threshold=0.005), temperature=temperature)])
        return sum(tokens.count(9) for tokens in tokens_of(told).values())

    unsure, neutral, sure = (nines(Sure(own)) for own in (0.0, 0.5, 1.0))
    assert unsure < neutral < sure
    assert neutral == nines(Sure(0.5), Rule.THRESHOLD) == nines(Sure(1.0), Rule.THRESHOLD)
