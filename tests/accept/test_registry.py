"""Rules from outside at work: each outcome is looked at, and a rule that fails costs speed, never the text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from paceline.accept import AcceptRule, Outcome, Verification
from paceline.types import Request, SamplingParams, Speculation
from tests.outside import registered
from tests.rig import Rig, build
from tests.rig_drafters import RIGS
from tests.runs import prompt, run, tokens_of

SAMPLING = SamplingParams(temperature=1, seed=3, n=3, max_tokens=20)
ITEMS = ("targets", "p", "likelihood", "coins", "round_coins", "noise")


def noisy() -> Rig:
    return build("toy", {"noisy": RIGS["model"]["noisy"]})


def asked(speculation: Speculation) -> list[Request]:
    return [
        Request(id=str(i), prompt=prompt(4 + i, seed=i), sampling=SAMPLING, speculation=speculation) for i in (0, 1)
    ]


def take_all(given: Verification) -> Outcome:
    """The drafters of these tests draft chains."""
    last = torch.cat((given.rows.roots[1:], torch.tensor([len(given.rows.tokens)]))) - 1
    return Outcome(alive=torch.ones_like(given.rows.tokens, dtype=torch.bool), last=last, tokens=given.targets[last])


def test_a_rule_decides() -> None:
    with registered(AcceptRule(name="gullible", judge=take_all, lossless=False)) as rule:
        rig = noisy()
        run(rig, asked(Speculation(rule=rule)))
        assert rig.engine.stats.accepted == rig.engine.stats.drafted > 20


@pytest.mark.parametrize("wants_probs", [False, True])
def test_what_a_rule_gets(wants_probs: bool) -> None:
    seen: list[Verification] = []

    def judge(given: Verification) -> Outcome:
        seen.append(given)
        rows, vocab = len(given.rows.tokens), given.vocab_size
        wide = [given.p, given.likelihood, *([given.q] if wants_probs else [])]
        assert {tuple(each.shape) for each in wide} == {(rows, vocab)}
        assert {tuple(each.shape) for each in (given.targets, given.coins, given.round_coins)} == {(rows,)}
        assert given.noise.shape == (len(given.rows.roots), vocab)
        assert given.thresholds == [0.25] * len(given.rows.roots)
        assert all(getattr(given, name) is getattr(given, name) for name in ITEMS), "computed once"
        return take_all(given)

    made = AcceptRule(name="theirs", judge=judge, lossless=False, wants_probs=wants_probs, threshold=0.5)
    with registered(made) as rule:
        run(noisy(), asked(Speculation(rule=rule, threshold=0.25)))
    assert seen


def none(given: Verification) -> Outcome:
    return None  # type: ignore[return-value]


def raises(given: Verification) -> Outcome:
    raise ZeroDivisionError("by the rule")


def wants_distributions(given: Verification) -> Outcome:
    return replace(take_all(given), tokens=given.q.argmax(-1))


def no_tokens(given: Verification) -> Outcome:
    return replace(take_all(given), tokens=torch.full((len(given.rows.roots),), given.vocab_size))


def no_path(given: Verification) -> Outcome:
    return replace(take_all(given), alive=torch.zeros_like(given.rows.tokens, dtype=torch.bool))


@pytest.mark.parametrize(
    ("judge", "said"),
    [
        (none, "it returned a NoneType and no Outcome"),
        (raises, "it raised ZeroDivisionError('by the rule')"),
        (wants_distributions, "only a rule with wants_probs has distributions"),
        (no_tokens, "Outcome.tokens must be from 0 to"),
        (no_path, "must be one path from the root"),
    ],
)
def test_a_rule_that_fails_is_out_of_use(
    judge: Callable[[Verification], Outcome], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named in the log once, and from there on the text is that of the coupled rule."""
    plain = tokens_of(run(noisy(), asked(Speculation(enabled=False))))
    with registered(AcceptRule(name="theirs", judge=judge, lossless=False)) as rule:
        rig = noisy()
        assert tokens_of(run(rig, asked(Speculation(rule=rule)))) == plain
        assert rig.engine.dead is None
        assert 0 < rig.engine.stats.accepted < rig.engine.stats.drafted
    [record] = [each for each in caplog.records if "theirs" in each.message]
    assert said in record.message
