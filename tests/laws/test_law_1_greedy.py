"""Law 1: greedy speculative tokens equal plain tokens, for every registered drafter × rule × chain/tree × batch mix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from paceline.types import Rule
from tests.laws import under_law
from tests.rig import Rig, build
from tests.rig_drafters import DEVICE_RIGS, RIGS, SELF, Made, model_drafter
from tests.runs import run, tokens_of
from tests.tiny_models import BACKENDS, Model

HEADS = [name for kind in ("eagle", "mtp", "medusa") for name in (*RIGS[kind], *DEVICE_RIGS) if name.startswith(kind)]
HARD = {"bad", "narrow", "wide", "bridged-one", "portfolio", *HEADS, *RIGS["block"]}  # or members: hardly ever right
MIXES: Mapping[str, Mapping[str, Any]] = {
    "usual": {},
    "few rows": {"max_step_tokens": 5},
    "few pages": {"num_pages": 14},
    "no prefix cache": {"prefix_cache": False},
    "long drafts": {"max_draft": 16, "max_draft_tokens": 256, "max_step_tokens": 256},
}


def test_every_registered_drafter_is_under_the_laws() -> None:
    missing = [kind for kind in under_law.KINDS if not RIGS.get(kind) and kind not in SELF]
    assert not missing, f"no rig for the drafters {missing}: give each an entry in RIGS of tests/rig_drafters.py"


@pytest.mark.parametrize("backend", ["toy", "compiled"])
@pytest.mark.parametrize("name", under_law.NAMES)
def test_each_drafter(name: str, backend: str) -> None:
    rig = build(backend, {name: under_law.made(name, backend, "greedy")})
    told = run(rig, under_law.asked(name, backend, "greedy", under_law.LOSSLESS))
    assert tokens_of(told) == tokens_of(under_law.plain_answers(backend, "greedy"))
    assert rig.engine.drafters[name].out is None
    assert rig.engine.stats.drafted > 0
    assert rig.engine.stats.accepted > 0 or name in HARD


@pytest.mark.parametrize("backend", ["compiled", "eager"])
@pytest.mark.parametrize("name", ["tree", "noisy"])
def test_sliding_windows(name: str, backend: str) -> None:
    """A window that a draft is longer than: nodes of a tree count by depth, not by row."""
    windowed = Model(window=6)
    asked = under_law.requests("greedy", (Rule.COUPLED,), count=6)

    def engine(drafters: Mapping[str, Made]) -> Rig:
        return build(backend, drafters, forward=windowed.forward(backend, num_pages=160), max_draft=16)

    expected = tokens_of(run(engine({}), asked))
    assert expected != tokens_of(under_law.plain_answers(backend, "greedy", 6)), "the window does not show"
    scripts = [[*request.prompt, *expected[request.id, 0]] for request in asked]
    made = under_law.scripted("tree", scripts) if name == "tree" else model_drafter(replace(windowed, noise=0.05))
    rig = engine({name: made})
    assert tokens_of(run(rig, asked)) == expected
    assert rig.engine.stats.accepted > 10


@pytest.mark.parametrize(("backend", "mix"), [("toy", mix) for mix in MIXES] + [(b, "usual") for b in BACKENDS[1:]])
def test_all_drafters_in_one_batch(backend: str, mix: str) -> None:
    count = len(under_law.NAMES)
    drafters = {name: under_law.made(name, backend, "greedy", count) for name in under_law.NAMES}
    rig = build(backend, drafters, **MIXES[mix])
    requests = [
        replace(request, speculation=replace(request.speculation, drafter=name))
        for name, request in zip(
            under_law.NAMES, under_law.requests("greedy", under_law.LOSSLESS, count=count), strict=True
        )
    ]
    told = run(rig, requests, every=2)
    assert tokens_of(told) == tokens_of(under_law.plain_answers(backend, "greedy", count))
    assert rig.engine.stats.accepted > 0
    assert (rig.engine.stats.preemptions > 0) == (mix == "few pages")


# On the compiled backend all of them are in one batch, below; in batches of their own they are for `make test-slow`.
ON_A_DEVICE = [*((name, "toy") for name in (*DEVICE_RIGS, *SELF)), *((name, "eager") for name in SELF)]
ON_A_DEVICE += [pytest.param(name, "compiled", marks=pytest.mark.slow) for name in DEVICE_RIGS]


@pytest.mark.parametrize(("name", "backend"), ON_A_DEVICE)
def test_each_drafter_on_a_device(name: str, backend: str) -> None:
    rig = build(backend, on_device={name: {**DEVICE_RIGS, **SELF}[name]})
    told = run(rig, under_law.device_requests("greedy"))
    assert tokens_of(told) == tokens_of(under_law.plain_device_answers(backend, "greedy"))
    assert rig.rounds is not None
    assert rig.rounds.most_in_flight == 2
    assert rig.rounds.launches == rig.engine.stats.steps
    assert rig.engine.stats.drafted > 0
    assert rig.engine.stats.accepted > 0 or name in HARD


@pytest.mark.parametrize("name", under_law.usual_first(*under_law.BESIDE_A_DEVICE))
def test_each_drafter_of_the_host_beside_a_device(name: str) -> None:
    made, requests = under_law.beside_a_device(name, "greedy")
    rig = build("toy", {name: made}, on_device={})
    told = run(rig, requests)
    assert tokens_of(told) == tokens_of(under_law.plain_device_answers("toy", "greedy"))
    assert rig.rounds.most_in_flight == 2
    assert rig.rounds.launches == rig.engine.stats.steps
    assert rig.engine.drafters[name].out is None
    assert rig.engine.stats.drafted > 0 or name == "bridged-one"  # its only word never follows a step in flight
    assert rig.engine.stats.accepted > 0 or name in HARD


@pytest.mark.parametrize("mix", MIXES)
def test_drafters_of_both_sides_in_one_batch(mix: str) -> None:
    names = (*under_law.SCRIPTED, "noisy", "noisy")
    made = {name: under_law.beside_a_device(name, "greedy", count=14)[0] for name in under_law.SCRIPTED}
    rig = build("toy", made, on_device={"noisy": DEVICE_RIGS["noisy"]}, **MIXES[mix])
    requests = [
        replace(request, speculation=replace(request.speculation, drafter=name))
        for name, request in zip([*names] * 2, under_law.device_requests("greedy", count=14), strict=True)
    ]
    told = run(rig, requests, every=2)
    assert tokens_of(told) == tokens_of(under_law.plain_device_answers("toy", "greedy", 14))
    assert rig.rounds.launches == rig.engine.stats.steps
    offered = [{seat.offer is None for seat in seats if seat.max_draft} for seats in rig.rounds.seats]
    assert {True, False} in offered or mix == "few rows", "no round had drafts of both"


@pytest.mark.parametrize(("backend", "mix"), [("toy", mix) for mix in MIXES] + [(b, "usual") for b in BACKENDS[1:]])
def test_all_drafters_of_a_device_in_one_batch(backend: str, mix: str) -> None:
    """They take turns, with two requests each; on the slowest backend one."""
    names = [*DEVICE_RIGS] * (1 if backend == "eager" else 2)
    rig = build(backend, on_device=DEVICE_RIGS, **MIXES[mix])
    requests = [
        replace(request, speculation=replace(request.speculation, drafter=name))
        for name, request in zip(names, under_law.device_requests("greedy", count=len(names)), strict=True)
    ]
    told = run(rig, requests, every=2)
    assert tokens_of(told) == tokens_of(under_law.plain_device_answers(backend, "greedy", len(names)))
    assert rig.engine.stats.accepted > 0
    assert (rig.engine.stats.preemptions > 0) == (mix == "few pages")
