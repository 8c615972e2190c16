"""Laws 1, 2, 4 and 6 over rounds that verify random trees on a device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.types import Request, SamplingParams, Speculation
from tests.laws import under_law
from tests.laws.test_law_4_kv import assert_remembered, walk
from tests.laws.test_law_6_neighbours import MIXES
from tests.odd_drafters import TreesOnDevice
from tests.rig import Rig, build
from tests.runs import mixed_requests, plain, run, tokens_of

NODES = 8


def scripts(backend: str, law: str) -> list[list[int]]:
    asked = {request.id: request for request in under_law.device_requests(law)}
    answers = under_law.plain_device_answers(backend, law)
    return [[*asked[id].prompt, *told.tokens] for (id, _), told in answers.items()]


def tree_rig(backend: str, law: str, **options: Any) -> Rig:
    return build(backend, on_device={"trees": TreesOnDevice(scripts(backend, law), nodes=NODES)}, **options)


@pytest.mark.parametrize("law", ["greedy", "sampled"])
@pytest.mark.parametrize("backend", ["toy", "compiled"])
def test_laws_1_and_2(backend: str, law: str) -> None:
    rig = tree_rig(backend, law)
    told = run(rig, under_law.device_requests(law))
    assert tokens_of(told) == tokens_of(under_law.plain_device_answers(backend, law))
    assert rig.rounds.launches == rig.engine.stats.steps
    assert 0 < rig.engine.stats.accepted < rig.engine.stats.drafted


@pytest.mark.parametrize("backend", ["toy", "compiled", "eager"])
def test_law_4(backend: str) -> None:
    """Keys and values of a path that was not first are those of a prefill."""
    asked = [replace(r, cache_salt=str(i % 2)) for i, r in enumerate(under_law.device_requests("sampled"))]
    asked = [replace(r, sampling=replace(r.sampling, stop_ids=())) for r in asked]
    rig = tree_rig(backend, "sampled")
    paths = watch_paths(rig)
    told = walk(rig, backend, asked)
    assert any(path != tuple(range(len(path))) for path in paths)
    assert_remembered(rig, backend, asked, told)


def watch_paths(rig: Rig) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    collect = rig.rounds.collect

    def watched(ticket: Any) -> Any:
        outcome = collect(ticket)
        paths.extend(landed.path for landed in outcome[1])
        return outcome

    rig.rounds.collect = watched
    return paths


@pytest.mark.parametrize("mix", MIXES)
def test_law_6(mix: str) -> None:
    rig = tree_rig("toy", "sampled", **MIXES[mix])
    told = run(rig, under_law.device_requests("sampled"), every=2 * ("two" in mix))
    alone: dict[Any, Any] = {}
    for request in plain(under_law.device_requests("sampled")):
        alone |= tokens_of(run(build("toy"), [request]))
    assert tokens_of(told) == alone
    assert rig.engine.stats.accepted > 0 or "small" in mix
    assert (rig.engine.stats.preemptions > 0) == ("pages" in mix)


def test_trees_beside_plain_neighbours() -> None:
    """Statistics count what was drafted and accepted, node by node."""
    rig = tree_rig("toy", "greedy")
    asked: list[Request] = under_law.device_requests("greedy")
    told = run(rig, asked)
    drafted = sum(each.stats.drafted for each in told.values())
    assert rig.engine.stats.drafted == drafted > 50
    for each in told.values():
        assert each.stats.accepted == sum(each.stats.accepted_by_position)


EDITED = (
    SamplingParams(temperature=0, repetition_penalty=1.3, logprobs=2),
    SamplingParams(temperature=0.9, seed=3, presence_penalty=0.7, frequency_penalty=0.4),
    SamplingParams(temperature=1, seed=4, logit_bias={5: 2.0, 9: -3.0}, logprobs=0, top_p=0.9),
    SamplingParams(temperature=0, min_tokens=8, stop_ids=tuple(range(3, 30)), frequency_penalty=0.5),
    SamplingParams(temperature=0.7, seed=8, allowed_tokens=tuple(range(40)), logprobs=3, top_k=9),
)


@pytest.mark.parametrize("backend", ["toy", "compiled"])
def test_every_parameter_along_a_tree(backend: str) -> None:
    """Penalties count the tokens of a row's own path, and log-probabilities are of the rows on the accepted one."""
    asked = mixed_requests(EDITED, [Speculation()], count=10)
    expected = run(build(backend), plain(asked))
    texts = [[*one.prompt, *expected[one.id, 0].tokens] for one in asked]
    rig = build(backend, on_device={"trees": TreesOnDevice(texts, nodes=NODES)})
    paths = watch_paths(rig)
    told = run(rig, asked)
    assert tokens_of(told) == tokens_of(expected)
    assert any(path != tuple(range(len(path))) for path in paths)
    for key, each in told.items():
        assert len(each.logprobs) == len(expected[key].logprobs)
        for mine, other in zip(each.logprobs, expected[key].logprobs, strict=True):
            assert (mine.token, mine.rank) == (other.token, other.rank)
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
