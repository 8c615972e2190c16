"""Law 2: for a fixed seed at temperature > 0, speculative tokens equal plain tokens, whatever drafted.

That is the promise of the rule `coupled`. `rejection` and `block` keep it where a draft comes without distributions.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.types import Request, Rule, SamplingParams
from tests.laws import under_law
from tests.rig import build
from tests.rig_drafters import DEVICE_RIGS, RIGS, SELF
from tests.runs import prompt, run, tokens_of
from tests.tiny_models import BACKENDS

ON_A_DEVICE = [*((name, "toy") for name in (*DEVICE_RIGS, *SELF)), *((name, "eager") for name in SELF)]
ON_A_DEVICE += under_law.usual_first(*DEVICE_RIGS, backend="compiled")
COMPUTING = ("model", "eagle", "mtp", "block", "portfolio", "layers", "self")
WITH_PROBS = {name for kind in COMPUTING for name in RIGS[kind]} | {"sure-chain"}


def rules_for(name: str) -> tuple[Rule, ...]:
    return (Rule.COUPLED,) if name in WITH_PROBS else under_law.LOSSLESS


@pytest.mark.parametrize("backend", ["toy", "compiled"])
@pytest.mark.parametrize("name", under_law.NAMES)
def test_each_drafter(name: str, backend: str) -> None:
    rig = build(backend, {name: under_law.made(name, backend, "sampled")})
    told = run(rig, under_law.asked(name, backend, "sampled", rules_for(name)))
    assert tokens_of(told) == tokens_of(under_law.plain_answers(backend, "sampled"))
    assert rig.engine.drafters[name].out is None
    assert rig.engine.stats.drafted > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_drafters_in_one_batch(backend: str) -> None:
    count = len(under_law.NAMES)
    drafters = {name: under_law.made(name, backend, "sampled", count) for name in under_law.NAMES}
    rig = build(backend, drafters)
    requests = [
        replace(request, speculation=replace(request.speculation, drafter=name))
        for name, request in zip(
            under_law.NAMES, under_law.requests("sampled", (Rule.COUPLED,), count=count), strict=True
        )
    ]
    told = run(rig, requests, every=1)
    assert tokens_of(told) == tokens_of(under_law.plain_answers(backend, "sampled", count))
    assert rig.engine.stats.accepted > 0


@pytest.mark.parametrize("name", under_law.usual_first(*under_law.BESIDE_A_DEVICE))
def test_each_drafter_of_the_host_beside_a_device(name: str) -> None:
    made, requests = under_law.beside_a_device(name, "sampled")
    rig = build("toy", {name: made}, on_device={})
    assert tokens_of(run(rig, requests)) == tokens_of(under_law.plain_device_answers("toy", "sampled"))
    assert rig.rounds.launches == rig.engine.stats.steps
    assert rig.engine.stats.drafted > 0


@pytest.mark.parametrize(("name", "backend"), ON_A_DEVICE)
def test_each_drafter_on_a_device(name: str, backend: str) -> None:
    rig = build(backend, on_device={name: {**DEVICE_RIGS, **SELF}[name]})
    told = run(rig, under_law.device_requests("sampled"))
    assert tokens_of(told) == tokens_of(under_law.plain_device_answers(backend, "sampled"))
    assert rig.rounds is not None
    assert rig.rounds.launches == rig.engine.stats.steps
    assert rig.engine.stats.drafted > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_come_and_go_on_a_device(backend: str) -> None:
    """Requests with penalties among plain ones: every step stays on the device."""
    rig = build(backend, {"noisy": RIGS["model"]["noisy"]}, on_device={"noisy": DEVICE_RIGS["noisy"]}, max_sequences=3)
    told = run(rig, under_law.requests("sampled", (Rule.COUPLED,)), every=7)
    assert tokens_of(told) == tokens_of(under_law.plain_answers(backend, "sampled"))
    assert rig.rounds is not None
    assert rig.rounds.launches == rig.engine.stats.steps > 20
    assert rig.engine.stats.accepted > 0


def test_a_drafter_on_a_device_that_knows_the_target_is_always_right() -> None:
    rig = build("toy", on_device={"good": DEVICE_RIGS["good"]}, max_draft_batch=5)  # now and then it has to catch up
    run(rig, under_law.device_requests("sampled"))
    assert rig.engine.stats.accepted == rig.engine.stats.drafted > 50
    assert rig.rounds is not None
    assert any(not chunk.target for chunks in rig.rounds.chunks for chunk in chunks)


def test_a_drafter_that_knows_the_target_is_always_right() -> None:
    """It draws with the target's own noise, so that its guesses are the target's tokens."""
    rig = build("toy", {"good": RIGS["model"]["good"]})
    run(rig, under_law.requests("sampled", (Rule.COUPLED,)))
    assert rig.engine.stats.accepted == rig.engine.stats.drafted > 100


def test_another_seed_gives_another_text() -> None:
    """Or the law above would hold for an engine that ignores the seed."""
    requests = [
        Request(id=str(seed), prompt=prompt(9, seed=1), sampling=SamplingParams(seed=seed, n=2, max_tokens=20))
        for seed in range(4)
    ]
    told = run(build("toy"), requests)
    assert len({tuple(each.tokens) for each in told.values()}) == 8


def test_without_a_seed_one_is_drawn() -> None:
    requests = [Request(id=i, prompt=(1, 2, 3), sampling=SamplingParams(max_tokens=30)) for i in "ab"]
    told = run(build("toy"), requests)
    assert told["a", 0].tokens != told["b", 0].tokens
