"""The drafters that the laws speak of: every registered kind by its rig, and scripted ones that branch and err."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.drafters.prediction import PREDICTION
from paceline.drafters.registry import REGISTRY
from paceline.rules import BUILT_IN
from paceline.types import OFF, Request, Rule, SamplingParams, Speculation
from tests.odd_drafters import Scripted
from tests.rig import build
from tests.rig_drafters import RIGS, Made, always
from tests.runs import DEVICE_PARAMS, GREEDY, SAMPLED, Key, Told, mixed_requests, plain, run

KINDS = tuple(REGISTRY)  # Paceline's own, before any test registers one
REGISTERED: Mapping[str, Made] = {name: made for kind in KINDS for name, made in RIGS.get(kind, {}).items()}
SCRIPTED: Mapping[str, Mapping[str, Any]] = {
    "chain": {"wrong": 0.3},
    "right-chain": {"wrong": 0.0},
    "sure-chain": {"wrong": 0.3, "probs": True},
    "tree": {"wrong": 0.3, "tree": True},
    "bushy-tree": {"wrong": 0.7, "tree": True},
}
NAMES = (*REGISTERED, *SCRIPTED)
# One drafter of each kind at least.
USUAL = {
    "noisy",
    "bridged",
    "eagle-tree",
    "eagle-flags",
    "eagle-parallel",
    "portfolio-by-seats",
    "portfolio-model",
    *SCRIPTED,
    *(next(iter(RIGS.get(kind, {})), kind) for kind in KINDS),
}
# Kinds that need the host's own steps: they share the target's KV memory, or hear its logits.
ON_HOST_STEPS = {name for kind in ("layers", "self", "recycling", "lookahead") for name in RIGS[kind]}
BESIDE_A_DEVICE = tuple(name for name in NAMES if name not in ON_HOST_STEPS)
LOSSLESS = tuple(rule for rule in BUILT_IN if rule.lossless)

PARAMS: Mapping[str, Sequence[SamplingParams]] = {"greedy": GREEDY, "sampled": SAMPLED}


def speculations(rules: Sequence[Rule]) -> list[Speculation]:
    """On beside off, long beside short."""
    on = [Speculation(rule=rule, max_draft=limit) for limit in (None, 2) for rule in rules]
    return [*on, OFF, Speculation(rule=rules[-1], max_draft=5)]


def requests(law: str, rules: Sequence[Rule], *, count: int = 9) -> list[Request]:
    return mixed_requests(PARAMS[law], speculations(rules), count=count)


@functools.cache
def plain_answers(backend: str, law: str, count: int = 9) -> dict[Key, Told]:
    return run(build(backend), plain(requests(law, (Rule.COUPLED,), count=count)))


def device_requests(law: str, *, count: int = 9) -> list[Request]:
    """Requests for an engine whose steps run on a device."""
    return mixed_requests(DEVICE_PARAMS[law], speculations((Rule.COUPLED,)), count=count)


@functools.cache
def plain_device_answers(backend: str, law: str, count: int = 9) -> dict[Key, Told]:
    """Without a device and without speculation."""
    return run(build(backend), plain(device_requests(law, count=count)))


def beside_a_device(name: str, law: str, *, count: int = 9) -> tuple[Made, list[Request]]:
    """Return a drafter of the host for an engine whose steps run on a device, and requests for it."""
    requests, answers = device_requests(law, count=count), plain_device_answers("toy", law, count)
    if name == PREDICTION:
        told = (answers[request.id, 0].tokens for request in requests)
        requests = [replace(each, prediction=nearly(text, seed=4)) for each, text in zip(requests, told, strict=True)]
    if name in REGISTERED:
        return REGISTERED[name], requests
    prompts = {request.id: request.prompt for request in requests}
    return scripted(name, [[*prompts[id], *told.tokens] for (id, _), told in answers.items()]), requests


def asked(name: str, backend: str, law: str, rules: Sequence[Rule], *, count: int = 9) -> list[Request]:
    """The same, each with a prediction of its answers where the drafter lives on that."""
    made = requests(law, rules, count=count)
    if name != PREDICTION:
        return made
    answers = plain_answers(backend, law, count)
    return [
        replace(request, prediction=nearly(answers[request.id, 0].tokens, seed=i)) for i, request in enumerate(made)
    ]


def nearly(tokens: Sequence[int], *, seed: int) -> tuple[int, ...]:
    """The answer as a client may have guessed it: some tokens others, some missing, some too many."""
    random = np.random.default_rng(seed)
    edits = {0: lambda token: [], 1: lambda token: [token, 1], 2: lambda token: [2]}
    pieces = [edits.get(int(random.integers(12)), lambda token: [token])(token) for token in tokens]
    return tuple(token for piece in pieces for token in piece)


def made(name: str, backend: str, law: str, count: int = 9) -> Made:
    if name in REGISTERED:
        return REGISTERED[name]
    asked = {request.id: request for request in requests(law, (Rule.COUPLED,), count=count)}
    answers = plain_answers(backend, law, count).items()
    scripts = [[*asked[request_id].prompt, *told.tokens] for (request_id, _), told in answers]
    return scripted(name, scripts)


def usual_first(*names: str, backend: str | None = None) -> list[Any]:
    """Cases of a test, on a backend if one is given. Variants of a kind of drafter that the same law meets elsewhere in
    `make test` are for `make test-slow`."""
    place = () if backend is None else (backend,)
    return [pytest.param(name, *place, marks=() if name in USUAL else pytest.mark.slow) for name in names]


def scripted(name: str, scripts: Sequence[Sequence[int]]) -> Made:
    return always(Scripted(scripts, **SCRIPTED[name]))
