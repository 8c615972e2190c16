"""Steps that are drawn to run plain change no text: laws 1 and 2 with a third of the steps drawn."""

from __future__ import annotations

import pytest

from paceline.engine import group
from paceline.types import Rule
from tests.laws import under_law
from tests.rig import build
from tests.rig_drafters import DEVICE_RIGS
from tests.runs import run, tokens_of


@pytest.fixture(autouse=True)
def draw_often(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("COST", 1.0), ("MAX_SHARE", 0.5), ("RUN", 2), ("FIRST_GAP", 1), ("TRIAL_GAP", 1)):
        monkeypatch.setattr(group, name, value)


@pytest.mark.parametrize("law", ["greedy", "sampled"])
@pytest.mark.parametrize("name", ["noisy", "eagle", "tree"])
def test_on_the_host(name: str, law: str) -> None:
    rig = build("compiled", {name: under_law.made(name, "compiled", law)}, measure_speedup=True)
    told = run(rig, under_law.asked(name, "compiled", law, (Rule.COUPLED,)))
    assert tokens_of(told) == tokens_of(under_law.plain_answers("compiled", law))
    found = rig.engine.snapshot().measurement
    assert found is not None
    assert found.drawn >= 2
    assert rig.engine.stats.drafted > 0


@pytest.mark.parametrize("law", ["greedy", "sampled"])
@pytest.mark.parametrize("name", ["noisy", "eagle", "ngram", "portfolio", "portfolio-model"])
def test_in_portable_rounds(name: str, law: str) -> None:
    rig = build("toy", on_device={name: DEVICE_RIGS[name]}, measure_speedup=True)
    told = run(rig, under_law.device_requests(law))
    assert tokens_of(told) == tokens_of(under_law.plain_device_answers("toy", law))
    found = rig.engine.snapshot().measurement
    assert found is not None
    assert found.drawn >= 2
    assert rig.engine.stats.drafted > 0


@pytest.mark.parametrize(("law", "rule"), [("sampled", Rule.REJECTION), ("greedy", Rule.THRESHOLD)])
def test_never_beside_a_request_whose_text_depends_on_drafts(law: str, rule: Rule) -> None:
    rig = build("toy", {"tree": under_law.made("tree", "toy", law)}, measure_speedup=True)
    told = run(rig, under_law.asked("tree", "toy", law, (rule,)))
    found = rig.engine.snapshot().measurement
    assert found is not None
    assert found.drawn == 0
    reasons = {answer.stats.unmeasured for answer in told.values()}
    assert f"not measured: under the rule {rule} the text depends on what is drafted" in reasons
