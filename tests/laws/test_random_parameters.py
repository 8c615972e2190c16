"""Laws 2, 6 and 7 at once: 32 sequences of one batch on a device, each with random parameters, answer as each of them
does alone, plain and on the host."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from paceline.types import OFF, Request, SamplingParams, Speculation
from tests.laws.test_law_7_parameters import assert_same
from tests.rig import build
from tests.rig_drafters import DEVICE_RIGS
from tests.runs import Key, Told, plain, prompt, run
from tests.tiny_models import VOCAB

COUNT = 32
DRAFTERS = ("noisy", "ngram", "eagle-narrow", "portfolio-model", "portfolio-by-seats")


def random_params(random: np.random.Generator) -> SamplingParams:
    """Parameters of which each is set in about every third request."""

    def maybe(value: object, otherwise: object) -> object:
        return value if random.random() < 0.35 else otherwise

    bias = {int(token): float(random.normal(0, 3)) for token in random.integers(0, VOCAB, 4)}
    allowed = tuple(int(token) for token in random.permutation(VOCAB)[: VOCAB // 2])
    stops = tuple(int(token) for token in random.integers(0, VOCAB, 6))
    return SamplingParams.of(
        temperature=maybe(0, float(random.uniform(0.5, 1.5))),
        top_k=maybe(int(random.integers(1, 40)), 0),
        top_p=maybe(float(random.uniform(0.3, 1)), 1.0),
        min_p=maybe(float(random.uniform(0, 0.2)), 0.0),
        repetition_penalty=maybe(float(random.uniform(0.7, 1.8)), 1.0),
        presence_penalty=maybe(float(random.uniform(-1, 2)), 0.0),
        frequency_penalty=maybe(float(random.uniform(-0.5, 1)), 0.0),
        logit_bias=maybe(bias, {}),
        allowed_tokens=maybe(allowed, None),
        stop_ids=stops,
        min_tokens=maybe(int(random.integers(1, 12)), 0),
        logprobs=maybe(int(random.integers(0, 6)), None),
        prompt_logprobs=maybe(int(random.integers(0, 3)), None),
        max_tokens=int(random.integers(14, 22)),
        seed=int(random.integers(0, 2**63)),
    )


@functools.cache
def requests(seed: int) -> list[Request]:
    random = np.random.default_rng(seed)
    return [
        Request(
            id=str(i),
            prompt=prompt(int(random.integers(1, 50)), seed=100 * seed + i, repeat=i % 3 == 0),
            sampling=random_params(random),
            speculation=OFF if i % 7 == 3 else Speculation(drafter=DRAFTERS[i % len(DRAFTERS)], max_draft=2 + i % 4),
        )
        for i in range(COUNT)
    ]


@functools.cache
def alone(backend: str, seed: int) -> dict[Key, Told]:
    told: dict[Key, Told] = {}
    for request in plain(requests(seed)):
        told |= run(build(backend), [request])
    return told


@pytest.mark.parametrize(("backend", "seed"), [("toy", 1), ("toy", 2), ("compiled", 3)])
def test_as_alone_on_the_host(backend: str, seed: int) -> None:
    on_device = {name: DEVICE_RIGS[name] for name in DRAFTERS}
    rig = build(
        backend, on_device=on_device, max_sequences=COUNT, max_draft_batch=COUNT, max_step_tokens=200, num_pages=400
    )
    assert_same(run(rig, requests(seed)), alone(backend, seed))
    assert rig.rounds is not None
    assert rig.rounds.launches == rig.engine.stats.steps
    assert 0 < rig.engine.stats.accepted < rig.engine.stats.drafted
