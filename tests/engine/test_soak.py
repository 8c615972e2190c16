"""Engines of random limits under random traffic: all laws at once, where no other test has looked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.kernels.base import PAGE_SIZE
from paceline.types import OFF, Finish, Request, Rule, SamplingParams, Speculation
from tests.laws.under_law import nearly
from tests.odd_drafters import Scripted
from tests.rig import Rig, build
from tests.rig_drafters import DEVICE_RIGS, RIGS, SELF, Made, always
from tests.runs import Key, Run, plain, prompt, run, tokens_of
from tests.tiny_models import CONTEXT

Random = np.random.Generator
REGISTERED: dict[str, Made] = {name: made for rigs in RIGS.values() for name, made in rigs.items()}
WITH_PROBS = {name for kind in ("model", "eagle", "mtp", "block", "self", "layers", "portfolio") for name in RIGS[kind]}
SCRIPTED: dict[str, dict[str, Any]] = {"chain": {"wrong": 0.2}, "tree": {"wrong": 0.4, "tree": True}}
SEEDS = [*range(4), 9, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 60) if seed != 9)]


def some_limits(random: Random) -> dict[str, Any]:
    """From hardly anything to plenty. One sequence must always fit."""
    draft = int(random.integers(1, 17))
    least = -(-(CONTEXT + draft + 1) // PAGE_SIZE)
    return {
        "max_sequences": int(random.integers(1, 9)),
        "max_step_tokens": int(random.choice([1, 2, 5, 16, 40, 256])),
        "max_draft": draft,
        "max_draft_tokens": int(random.choice([0, 3, 20, 128])),
        "max_draft_batch": int(random.choice([1, 4, 32])),
        "max_draft_context": int(random.choice([60, 1000])),
        "min_acceptance": float(random.choice([0.0, 0.1, 0.5])),
        "acceptance_window": int(random.choice([5, 48])),
        "pause_tokens": int(random.choice([1, 8])),
        "prefix_cache": bool(random.random() < 0.8),
        "num_pages": least + int(random.choice([0, 1, 5, 60])),
    }


def some_params(random: Random) -> SamplingParams:
    def maybe(value: Any, otherwise: Any) -> Any:
        return value if random.random() < 0.25 else otherwise

    return SamplingParams(
        temperature=float(random.choice([0, 0, 0.6, 1.0, 1.5])),
        top_k=maybe(int(random.integers(1, 50)), 0),
        top_p=maybe(float(random.uniform(0.3, 1)), 1.0),
        min_p=maybe(float(random.uniform(0, 0.2)), 0.0),
        repetition_penalty=maybe(1.3, 1.0),
        presence_penalty=maybe(0.7, 0.0),
        frequency_penalty=maybe(0.2, 0.0),
        min_tokens=maybe(3, 0),
        max_tokens=int(random.integers(3, 40)),
        stop_ids=maybe((1, 2, 3, 4), ()),
        seed=int(random.integers(2**62)),
        n=maybe(2, 1),
        logprobs=maybe(2, None),
        prompt_logprobs=maybe(1, None),
    )


def some_request(random: Random, name: str) -> Request:
    """Prompts begin alike now and then, so that pages are shared."""
    length = int(random.integers(1, 110))
    tokens = prompt(length, seed=int(random.integers(3)), repeat=random.random() < 0.3)
    drafter = str(random.choice([*REGISTERED, *SCRIPTED]))
    longest = None if random.random() < 0.7 else int(random.integers(1, 5))
    rule = Rule.REJECTION if random.random() < 0.3 and drafter not in WITH_PROBS else Rule.COUPLED
    speculation = Speculation(drafter=drafter, max_draft=longest, rule=rule) if random.random() < 0.9 else OFF
    salt = str(random.choice(["", "", "salt"]))
    return Request(id=name, prompt=tokens, sampling=some_params(random), speculation=speculation, cache_salt=salt)


def some_engine(random: Random, asked: list[Request], answers: dict[Key, list[int]], way: dict[str, Any]) -> Rig:
    prompts = {request.id: request.prompt for request in asked}
    scripts = [[*prompts[key[0]], *tokens] for key, tokens in answers.items()]
    made = REGISTERED | {name: always(Scripted(scripts, **options)) for name, options in SCRIPTED.items()}
    return build("toy", made, **way, **some_limits(random))


def drive(random: Random, rig: Rig, asked: list[Request]) -> Run:
    """Requests come when they like; now and then one is aborted."""
    going, waiting = Run(rig), list(asked)
    while waiting or rig.engine.has_work:
        while waiting and random.random() < 0.4:
            going.submit([waiting.pop()])
        if random.random() < 0.02 and going.told:
            rig.engine.abort(list(going.told)[int(random.integers(len(going.told)))][0])
        going.step()
    going.check_over()
    assert rig.engine.dead is None, rig.engine.dead
    return going


def device_request(random: Random, request: Request) -> Request:
    """The request as a device could do it, nearly always."""
    if random.random() < 0.1:
        return request
    name = str(random.choice([*DEVICE_RIGS, *SELF, *SCRIPTED, *SCRIPTED]))
    rule = Rule.COUPLED
    speculation = replace(request.speculation, drafter=name, rule=rule) if request.speculation.enabled else OFF
    return replace(request, speculation=speculation)


@pytest.mark.unwatched
@pytest.mark.parametrize("seed", SEEDS)
def test_soak(seed: int) -> None:
    random = np.random.default_rng(seed)
    asked = [some_request(random, str(i)) for i in range(10)]
    soak(random, asked, {})


@pytest.mark.unwatched
@pytest.mark.parametrize("seed", SEEDS)
def test_soak_with_a_device(seed: int) -> None:
    random = np.random.default_rng(seed)
    asked = [device_request(random, some_request(random, str(i))) for i in range(10)]
    rig = soak(random, asked, {"on_device": {**DEVICE_RIGS, **SELF}})
    assert rig.rounds is not None
    assert rig.rounds.launches == rig.engine.stats.steps


def soak(random: Random, asked: list[Request], way: dict[str, Any]) -> Rig:
    expected = tokens_of(run(build("toy", prefix_cache=False), plain(asked)))
    rig = some_engine(random, asked, expected, way)
    predictions = {request.id: nearly(expected[request.id, 0], seed=0) for request in asked if random.random() < 0.3}
    for turn in range(2):  # the second time over, prefixes are known
        again = [replace(request, prediction=predictions.get(request.id, ())) for request in asked]
        going = drive(random, rig, again)
        for key, told in going.told.items():
            whole = expected[key]
            assert told.tokens == (whole[: len(told.tokens)] if told.finish is Finish.ABORT else whole), (turn, key)
    assert all(guard.out is None for guard in rig.engine.drafters.values())
    return rig
