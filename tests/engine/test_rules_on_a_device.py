"""Rules other than the coupled one inside rounds: the host's verdicts, without the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.accept import AcceptRule, accept_likely, accept_rejection
from paceline.types import Request, Rule, SamplingParams, Speculation
from tests.outside import registered
from tests.rig import Rig, build
from tests.rig_drafters import DEVICE_RIGS, RIGS
from tests.runs import Key, Told, plain, prompt, run, tokens_of

PARAMS: Mapping[str, SamplingParams] = {
    "bare": SamplingParams(seed=1),
    "filters": SamplingParams(seed=2, temperature=0.8, top_k=20, top_p=0.9),
    "min_p": SamplingParams(seed=3, temperature=1.4, min_p=0.03, logprobs=1),
    "edits": SamplingParams(seed=4, repetition_penalty=1.3, frequency_penalty=0.4, logit_bias={5: 1.0}),
    "greedy": SamplingParams(temperature=0),
}
LOSSY = (Rule.THRESHOLD, Rule.TYPICAL, Rule.CONFIDENCE)
OTHERS = (Rule.REJECTION, Rule.BLOCK, *LOSSY)


def requests(*rules: Rule, tokens: int = 20, threshold: float = 0.4) -> list[Request]:
    """One request for each kind of parameters, all under these rules in turn."""
    return [
        Request(
            id=name,
            prompt=prompt(9 + i, seed=i),
            sampling=replace(params, max_tokens=tokens),
            speculation=Speculation(
                rule=rules[i % len(rules)], threshold=threshold if rules[i % len(rules)] in LOSSY else None
            ),
        )
        for i, (name, params) in enumerate(PARAMS.items())
    ]


def on_host(asked: list[Request], name: str = "noisy", backend: str = "toy") -> dict[Key, Told]:
    kind = "model" if name == "noisy" else name
    return run(build(backend, {name: RIGS[kind][name]}, **FIXED), asked)


def on_device(asked: list[Request], name: str = "noisy", backend: str = "toy") -> tuple[Rig, dict[Key, Told]]:
    rig = build(backend, on_device={name: DEVICE_RIGS[name]}, **FIXED)
    told = run(rig, asked)
    assert rig.rounds is not None
    assert rig.rounds.launches == rig.engine.stats.steps
    return rig, told


FIXED: Mapping[str, Any] = {"fixed_draft": True, "max_draft": 3, "max_step_tokens": 256}  # texts depend on drafts


@pytest.mark.unwatched
@pytest.mark.parametrize("rule", OTHERS)
def test_the_device_says_what_the_host_says(rule: Rule) -> None:
    """As long as both draft alike: near the end of an answer they know differently how much room is left."""
    asked = requests(rule, tokens=40)
    mine, theirs = on_device(asked)[1], on_host(asked)
    for key, told in mine.items():
        assert told.tokens[:32] == theirs[key].tokens[:32]
    assert any(told.stats.accepted < told.stats.drafted for told in mine.values()) or rule is Rule.TYPICAL


def test_a_device_knows_how_sure_its_drafter_is() -> None:
    """So that the rule is another one than a threshold, and the same as on the host."""
    sure, fixed = (requests(rule, tokens=40, threshold=0.05) for rule in (Rule.CONFIDENCE, Rule.THRESHOLD))
    mine, theirs = on_device(sure)[1], on_host(sure)
    for key, told in mine.items():
        assert told.tokens[:32] == theirs[key].tokens[:32]
    assert tokens_of(mine) != tokens_of(on_device(fixed)[1])


@pytest.mark.parametrize("rule", LOSSY)
def test_lossy_rules_judge_trees(rule: Rule) -> None:
    """Along all branches, as the host does it."""
    asked = requests(rule, tokens=40)
    rig, mine = on_device(asked, "medusa", "eager")
    theirs, coupled = on_host(asked, "medusa", "eager"), on_device(plain(asked), "medusa", "eager")[0]
    for key, told in mine.items():
        assert told.tokens[:32] == theirs[key].tokens[:32]
    assert rig.engine.stats.accepted > coupled.engine.stats.accepted


def test_rules_in_one_batch() -> None:
    """Each sequence has its own, and none of them touches the others."""
    asked = requests(*OTHERS, Rule.COUPLED, tokens=24)
    together = on_device(asked)[1]
    for request in asked:
        alone = on_device([request])[1]
        assert alone[request.id, 0].tokens[:16] == together[request.id, 0].tokens[:16]
    [coupled] = plain([asked[4]])
    assert together["greedy", 0].tokens == run(build("toy"), [coupled])["greedy", 0].tokens


@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.BLOCK])
def test_drafts_without_distributions_are_coupled(rule: Rule) -> None:
    asked = [replace(one, prompt=prompt(40, seed=i, repeat=True)) for i, one in enumerate(requests(rule))]
    rig, told = on_device(asked, "ngram-1")
    assert tokens_of(told) == tokens_of(run(build("toy"), plain(asked)))
    assert rig.engine.stats.drafted > 0


def test_a_rule_of_another_package_on_a_device() -> None:
    """It sees what it sees on the host; one that fails is out of use, and its drafts are coupled."""
    seen: list[Any] = []

    def judge(given: Any) -> Any:
        seen.append(given)
        return accept_rejection(given.rows, given.p, given.q, given.coins, given.noise)

    def fail(given: Any) -> Any:
        raise ValueError("no opinion")

    own = AcceptRule(name="outside_rejection", judge=judge, lossless=True, wants_probs=True, devices=("cpu", "cuda"))
    bad = AcceptRule(name="outside_failure", judge=fail, lossless=True, devices=("cpu", "cuda"))
    with registered(own) as mine, registered(bad) as broken:
        told, expected = on_device(requests(mine, tokens=30))[1], on_device(requests(Rule.REJECTION, tokens=30))[1]
        assert tokens_of(on_device(requests(broken))[1]) == tokens_of(run(build("toy"), plain(requests(broken))))
    assert {key: each.tokens[:24] for key, each in told.items()} == {
        key: each.tokens[:24] for key, each in expected.items()
    }
    assert seen
    assert all(len(given.rows.roots) == len(given.thresholds) for given in seen)


def test_a_rule_of_another_package_judges_trees() -> None:
    """As rows with parents, and its own path is committed."""
    trees = 0

    def judge(given: Any) -> Any:
        nonlocal trees
        after_another = given.rows.parents[1:] < torch.arange(len(given.rows.parents) - 1)
        trees += bool((after_another & (given.rows.owners[1:] == given.rows.owners[:-1])).any())
        floors = torch.tensor(given.thresholds)[given.rows.owners]
        return accept_likely(given.rows, given.targets, given.likelihood, floors)

    own = AcceptRule(name="outside_likely", judge=judge, lossless=False, threshold=0.4, devices=("cpu", "cuda"))
    with registered(own) as mine:
        told = on_device(requests(mine, tokens=30), "medusa", "eager")[1]
    expected = on_device(requests(Rule.THRESHOLD, tokens=30), "medusa", "eager")[1]
    assert trees
    assert {key: each.tokens[:24] for key, each in told.items()} == {
        key: each.tokens[:24] for key, each in expected.items()
    }
