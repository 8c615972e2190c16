"""Law 6: a sequence's text does not depend on its neighbours: not on who they are, when they come, or who has to yield.

This is the promise of `coupled`, and of `rejection` for drafts without distributions. With distributions `rejection`
gives each token the right distribution, but which token depends on where drafts end, and that on the room there is.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.types import Request, Rule, Speculation
from tests.laws import under_law
from tests.rig import Rig, build
from tests.rig_drafters import DEVICE_RIGS, Made
from tests.runs import DEVICE_PARAMS, GREEDY, SAMPLED, Key, mixed_requests, plain, run, tokens_of

COUNT = 8
NAMES = ("noisy", "ngram", "tree", "chain")
MIXES: Mapping[str, Mapping[str, Any]] = {
    "all at once": {},
    "two at a time": {"max_sequences": 2},
    "few rows": {"max_step_tokens": 6},
    "few pages": {"num_pages": 12},
    "few pages and rows": {"num_pages": 12, "max_step_tokens": 7},
    "few draft tokens": {"max_draft_tokens": 5},
    "small draft batch": {"max_draft_batch": 4},
}


def asked() -> list[Request]:
    """Each with a drafter of its own, some with none; greedy beside seeded."""
    speculations = [Speculation(drafter=name, rule=rule) for rule in under_law.LOSSLESS for name in NAMES]
    requests = mixed_requests((*GREEDY, *SAMPLED), speculations, count=COUNT)
    return [
        replace(r, speculation=replace(r.speculation, rule=Rule.COUPLED)) if r.speculation.drafter == "noisy" else r
        for r in requests
    ]


@functools.cache
def alone(backend: str) -> dict[Key, list[int]]:
    """Plain, each in an engine of its own."""
    told: dict[Key, list[int]] = {}
    for request in plain(asked()):
        told |= tokens_of(run(build(backend), [request]))
    return told


def engine(backend: str, **options: Any) -> Rig:
    scripts = [[*request.prompt, *alone(backend)[request.id, 0]] for request in asked()]
    made: dict[str, Made] = {name: under_law.REGISTERED[name] for name in ("noisy", "ngram")}
    made |= {name: under_law.scripted(name, scripts) for name in ("tree", "chain")}
    return build(backend, made, **options)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("backend", ["toy", "compiled"])
def test_in_any_mix(backend: str, mix: str) -> None:
    rig = engine(backend, **MIXES[mix])
    assert tokens_of(run(rig, asked())) == alone(backend)
    assert rig.engine.stats.accepted > 0
    assert (rig.engine.stats.preemptions > 0) == ("pages" in mix)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("backend", ["toy", "compiled"])
def test_in_any_order(backend: str, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(COUNT)
    requests = [asked()[i] for i in order]
    assert tokens_of(run(engine(backend, num_pages=16), requests, every=seed)) == alone(backend)


def requests_for_a_device() -> list[Request]:
    speculations = [Speculation(drafter=name) for name in ("noisy", "ngram", "portfolio")]
    return mixed_requests((*DEVICE_PARAMS["greedy"], *DEVICE_PARAMS["sampled"]), speculations, count=11)


@functools.cache
def alone_on_device(backend: str) -> dict[Key, list[int]]:
    told: dict[Key, list[int]] = {}
    for request in plain(requests_for_a_device()):
        told |= tokens_of(run(build(backend), [request]))
    return told


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("backend", ["toy", "compiled"])
def test_on_a_device_in_any_mix(backend: str, mix: str) -> None:
    on_device = {name: DEVICE_RIGS[name] for name in ("noisy", "ngram", "portfolio")}
    rig = build(backend, on_device=on_device, **MIXES[mix])
    assert tokens_of(run(rig, requests_for_a_device(), every=2 * ("two" in mix))) == alone_on_device(backend)
    assert rig.engine.stats.accepted > 0 or "small" in mix
    assert rig.rounds is not None
    assert rig.engine.stats.steps == rig.rounds.launches > 5
    assert (rig.engine.stats.preemptions > 0) == ("pages" in mix)


def test_beside_a_neighbour_that_is_aborted() -> None:
    rig = engine("toy")
    for request in asked():
        rig.engine.submit(request)
    told: dict[Key, list[int]] = {}
    for turn in range(1000):
        for event in rig.engine.step():
            told.setdefault((event.request_id, event.sample), []).extend(event.tokens)
        if turn == 5:
            rig.engine.abort("1")
        if not rig.engine.has_work:
            break
    aborted = {key for key in told if key[0] == "1"}
    assert aborted
    assert {key: tokens for key, tokens in told.items() if key not in aborted} == {
        key: tokens for key, tokens in alone("toy").items() if key not in aborted
    }


def test_beside_its_twin() -> None:
    """The same request many times over, sharing pages: always the same text."""
    request = asked()[1]
    twins = [replace(request, id=f"twin {i}") for i in range(6)]
    told = tokens_of(run(engine("toy"), twins, every=3))
    assert {tuple(tokens) for tokens in told.values()} == {
        tuple(tokens) for key, tokens in alone("toy").items() if key[0] == request.id
    }
