"""The laws over rounds of CUDA kernels: few and short requests by the interpreter, all of them on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import pytest

from paceline.drafters.ngram import LookupOnDevice
from paceline.types import Request
from tests.laws import test_random_parameters, under_law
from tests.odd_drafters import TreesOnDevice
from tests.rig import build
from tests.rig_drafters import DEVICE_RIGS, RIGS, SELF, DeviceRig, PortfolioRig
from tests.runs import Key, Told, plain, run, tokens_of
from tests.tiny_models import ON_GPU, Model

DRAFTERS: Mapping[str, DeviceRig] = {
    "ngram": DEVICE_RIGS["ngram"],
    "noisy": DEVICE_RIGS["noisy"],
    "wide": DEVICE_RIGS["wide"],
    "parallel": DEVICE_RIGS["parallel"],
    "portfolio-model": DEVICE_RIGS["portfolio-model"],
    "portfolio-parallel": DEVICE_RIGS["portfolio-parallel"],
    **SELF,
}
PAIRS = [(name, law) for name in DRAFTERS for law in ("greedy", "sampled")]
if not ON_GPU:
    PAIRS = [("noisy", "greedy"), ("layers", "sampled"), ("portfolio-model", "sampled")]
COUNT = 9 if ON_GPU else 2


def requests(law: str) -> list[Request]:
    asked = under_law.device_requests(law, count=COUNT)
    return asked if ON_GPU else [shorter(one) for one in asked]


def shorter(one: Request) -> Request:
    return replace(one, prompt=one.prompt[:6], sampling=replace(one.sampling, max_tokens=3, n=1))


@functools.cache
def plain_answers(law: str) -> dict[Key, Told]:
    return run(build("cuda", on_device={}), plain(requests(law)))


@pytest.mark.parametrize(("name", "law"), PAIRS)
def test_same_text_whoever_drafts(name: str, law: str) -> None:
    rig = build("cuda", on_device={name: DRAFTERS[name]})
    assert tokens_of(run(rig, requests(law))) == tokens_of(plain_answers(law))
    assert rig.engine.stats.drafted > 0


def test_same_text_where_few_tokens_exist() -> None:
    """Whatever is said stands in the prompt, so that even two short requests have something to look up, and to copy
    beside a network."""
    few = Model(vocab_size=5)
    asked = [
        replace(
            one,
            prompt=tuple(token % 5 for token in one.prompt),
            sampling=replace(one.sampling, stop_ids=(), allowed_tokens=None, logit_bias={}),
        )
        for one in requests("sampled")
    ]
    rigs = [
        build("cuda", forward=few.forward("cuda", num_pages=40), on_device=by)
        for by in ({}, {"ngram": LookupOnDevice()}, {"portfolio": PortfolioRig(replace(few, noise=0.05))})
    ]
    told = run(rigs[0], plain(asked))
    for rig in rigs[1:]:
        assert tokens_of(run(rig, asked)) == tokens_of(told)
        assert rig.engine.stats.drafted > 0


@pytest.mark.parametrize(
    "by", [DEVICE_RIGS["ngram"], LookupOnDevice(reads_prediction=True)], ids=["beside ngram", "alone"]
)
def test_same_text_with_a_prediction(by: LookupOnDevice) -> None:
    """Beside another drafter the host offers it where it is followed; alone, the device looks in it."""
    answers = plain_answers("greedy")
    asked = [replace(one, prediction=tuple(answers[one.id, 0].tokens[:12])) for one in requests("greedy")]
    rig = build("cuda", RIGS["prediction"], on_device={"prediction" if by.reads_prediction else "ngram": by})
    told = run(rig, asked)
    assert tokens_of(told) == tokens_of(answers)
    assert sum(one.stats.prediction_accepted for one in told.values()) > 0


@pytest.mark.skipif(not ON_GPU, reason="the interpreter takes too long for it: test_cuda_rounds.py has the states")
@pytest.mark.parametrize("law", ["greedy", "sampled"])
def test_same_text_with_hidden_states_for_the_host(law: str) -> None:
    """A drafter on the host reads them, beside one of the device that reads its own."""
    rig = build("cuda", {"medusa": RIGS["medusa"]["medusa"]}, on_device={"eagle": DEVICE_RIGS["eagle"]})
    asked = [
        replace(one, speculation=replace(one.speculation, drafter=("medusa", "eagle")[i % 2]))
        for i, one in enumerate(requests(law))
    ]
    assert tokens_of(run(rig, asked)) == tokens_of(plain_answers(law))
    assert rig.engine.drafters["medusa"].out is None
    assert rig.engine.stats.drafted > 0


@pytest.mark.parametrize("law", ["greedy", "sampled"] if ON_GPU else ["sampled"])
def test_same_text_through_trees(law: str) -> None:
    asked = {one.id: one for one in requests(law)}
    scripts = [[*asked[id].prompt, *told.tokens] for (id, _), told in plain_answers(law).items()]
    rig = build("cuda", on_device={"trees": TreesOnDevice(scripts, nodes=8)})
    assert tokens_of(run(rig, requests(law))) == tokens_of(plain_answers(law))
    assert rig.engine.stats.accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"max_step_tokens": 7}, {"num_pages": 14}, {"prefix_cache": False}])
@pytest.mark.parametrize("law", ["greedy", "sampled"])
def test_same_text_under_pressure(options: Mapping[str, int], law: str) -> None:
    rig = build("cuda", on_device={"noisy": DEVICE_RIGS["noisy"]}, **options)
    assert tokens_of(run(rig, requests(law))) == tokens_of(plain_answers(law))


@pytest.mark.parametrize("law", ["greedy", "sampled"])
def test_steps_on_the_host_give_the_same_text(law: str) -> None:
    """Without a device's steps: passes one by one, sampling on the host."""
    assert tokens_of(run(build("cuda"), plain(requests(law)))) == tokens_of(plain_answers(law))


@pytest.mark.skipif(not ON_GPU, reason="the interpreter takes too long for it")
@pytest.mark.parametrize("seed", [1, 2])
def test_random_parameters_in_one_batch(seed: int) -> None:
    """Tokens and log-probabilities of 32 sequences are those of a plain run, bit by bit."""
    asked = test_random_parameters.requests(seed)
    options = {"max_sequences": 32, "max_draft_batch": 32, "max_step_tokens": 200, "num_pages": 400}
    told = run(build("cuda", on_device={}, **options), plain(asked))
    drafters = {name: DEVICE_RIGS[name] for name in test_random_parameters.DRAFTERS}
    spoken = run(build("cuda", on_device=drafters, **options), asked)
    assert tokens_of(spoken) == tokens_of(told)
    for key, each in spoken.items():
        assert each.logprobs == told[key].logprobs
        assert each.prompt_logprobs == told[key].prompt_logprobs
