"""Embeddings: hidden states pooled over a prompt, however it is cut into steps and whoever runs beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline.engine.pooling import Pool
from paceline.errors import InvalidRequest
from paceline.runner.batch import Share, build_batch
from paceline.types import EMBEDDING, OFF, POOLINGS, Finish, Request, SamplingParams
from tests.rig import Rig, build
from tests.rig_drafters import DEVICE_RIGS, RIGS
from tests.runs import prompt, run
from tests.tiny_models import BACKENDS

PROMPT = prompt(75, seed=4)
NEIGHBOURS = [
    Request(id=f"n{i}", prompt=prompt(20, seed=i), sampling=SamplingParams(max_tokens=30, seed=i)) for i in (1, 2)
]


def embedding(id: str = "e", *, pooling: str = "mean", of: tuple[int, ...] = PROMPT) -> Request:
    return Request(id=id, prompt=of, sampling=EMBEDDING, speculation=OFF, pooling=pooling)


def vectors(rig: Rig, *requests: Request) -> dict[str, np.ndarray]:
    """The embeddings of a run to its end."""
    found: dict[str, np.ndarray] = {}
    for request in requests:
        rig.engine.submit(request)
    while rig.engine.has_work:
        for event in rig.engine.step():
            assert event.finish in (None, Finish.LENGTH, Finish.STOP), event
            if event.embedding is not None:
                assert event.finish is not None, "it is known at the end"
                found[event.request_id] = np.array(event.embedding)
        rig.cache.check()
    rig.engine.check()
    return found


def expected(backend: str, pooling: str, tokens: tuple[int, ...] = PROMPT) -> np.ndarray:
    """The embedding by one pass over the whole prompt."""
    rig = build(backend, max_step_tokens=256)
    with rig.engine.probes.seated(tokens) as lane:
        share = Share(lane=lane, start=0, count=len(tokens), outs=1)
        states = rig.forward(build_batch(rig.lanes, [share], states=True)).states
    assert states is not None
    vector = (states[-1] if pooling == "last" else states.mean(dim=0)).double().numpy()
    return np.asarray(vector / np.linalg.norm(vector))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("rows", [7, 32, 256])
def test_chunks_make_the_vector_of_one_pass(backend: str, pooling: str, rows: int) -> None:
    rig = build(backend, max_step_tokens=rows)
    found = vectors(rig, embedding(pooling=pooling))["e"]
    assert np.linalg.norm(found) == pytest.approx(1)
    np.testing.assert_allclose(found, expected(backend, pooling), atol=1e-5)
    again = vectors(rig, embedding(pooling=pooling))["e"]
    np.testing.assert_allclose(again, found, atol=1e-6, err_msg="a prompt in the prefix cache is read again")


def test_states_are_those_of_the_last_norm() -> None:
    """The compiled states and the eager ones are the tap after the last norm."""
    for backend in ("compiled", "eager"):
        forward = build(backend, {"medusa": RIGS["medusa"]["medusa"]}, max_step_tokens=256)
        with forward.engine.probes.seated(PROMPT) as lane:
            share = Share(lane=lane, start=0, count=len(PROMPT), outs=1)
            output = forward.forward(build_batch(forward.lanes, [share], states=True))
            assert output.states is not None
            assert output.features is not None
            assert torch.equal(output.states, output.features), "tap 2 of two layers"
            silent = forward.forward(build_batch(forward.lanes, [share], features=False, states=False))
            assert silent.states is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_neighbours_neither_change_it_nor_notice_it(backend: str) -> None:
    drafters = {"eagle": RIGS["eagle"]["eagle"]}
    alone = run(build(backend, drafters), NEIGHBOURS)
    rig = build(backend, drafters)
    events: dict[str, list[int]] = {request.id: [] for request in NEIGHBOURS}
    found: dict[str, Any] = {}
    for request in (NEIGHBOURS[0], embedding("mean"), NEIGHBOURS[1], embedding("last", pooling="last")):
        rig.engine.submit(request)
    while rig.engine.has_work:
        for event in rig.engine.step():
            events.setdefault(event.request_id, []).extend(event.tokens)
            found |= {} if event.embedding is None else {event.request_id: np.array(event.embedding)}
    for request in NEIGHBOURS:
        assert events[request.id] == alone[request.id, 0].tokens
    for pooling in POOLINGS:
        np.testing.assert_allclose(found[pooling], expected(backend, pooling), atol=1e-5)
    rig.engine.check()


@pytest.mark.parametrize("pooling", POOLINGS)
def test_on_a_device(pooling: str) -> None:
    """Every step stays there, also that of a prompt whose last chunk is one token."""
    for rows in (32, 8):
        rig = build("toy", on_device={"ngram": DEVICE_RIGS["ngram"]}, max_step_tokens=rows)
        for request in NEIGHBOURS:
            rig.engine.submit(request)
        np.testing.assert_allclose(vectors(rig, embedding(pooling=pooling))["e"], expected("toy", pooling), atol=1e-5)
        assert rig.rounds is not None
        assert rig.rounds.launches == rig.engine.stats.steps


def test_one_that_is_preempted_counts_no_token_twice() -> None:
    pool = Pool("mean", 6)
    states = torch.arange(12.0).view(6, 2)
    pool.add(0, states[:4])
    assert pool.embedding() is None
    pool.add(0, states[:3])  # read again from the start
    pool.add(3, states[3:6])
    mean = states.double().mean(dim=0).numpy()
    np.testing.assert_allclose(pool.embedding(), mean / np.linalg.norm(mean))
    few = build("toy", num_pages=12, max_sequences=4)
    texts = [prompt(70, seed=seed) for seed in range(4)]
    found = vectors(few, *[embedding(str(i), of=text) for i, text in enumerate(texts)])
    for i, text in enumerate(texts):
        np.testing.assert_allclose(found[str(i)], expected("toy", "mean", text), atol=1e-5)


def test_an_aborted_one_has_none_and_keeps_nothing() -> None:
    rig = build("toy", max_step_tokens=8)
    rig.engine.submit(embedding())
    rig.engine.step()
    rig.engine.abort("e")
    events = rig.engine.step()
    assert [(event.finish, event.embedding) for event in events] == [(Finish.ABORT, None)]
    rig.engine.check()
    assert rig.cache.pool.held == 0


def test_a_zero_vector_stays_one() -> None:
    pool = Pool("last", 1)
    pool.add(0, torch.zeros(1, 3))
    assert pool.embedding() == (0.0, 0.0, 0.0)


def test_an_unknown_pooling_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="mean or last"):
        embedding(pooling="max")
