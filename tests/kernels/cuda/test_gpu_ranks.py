"""A model over two ranks on one GPU, two processes that meet in each other's memory over CUDA-IPC.

They take turns on the device, so this says nothing about speed. Run by `make test-gpu`; the interpreter has
test_split_rounds.py.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.config import EngineConfig
from paceline.engine.assemble import Parts, assemble
from paceline.errors import InvalidRequest, RankLost
from paceline.runner.rounds.ranks import LeadingRounds
from paceline.types import OFF, Request, Speculation
from tests.kernels.cuda.conftest import ON_GPU
from tests.laws.test_random_parameters import random_params
from tests.runs import prompt
from tests.tiny_models import VOCAB

pytestmark = pytest.mark.skipif(not ON_GPU, reason="real ranks need a GPU")
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
DRAFTERS = ("ngram", "eagle:shape", "model:shape:{}", "portfolio ngram eagle:shape")
STUCK = "rank 1 is stuck: no answer for 8 s"
OPTIONS: dict[str, Any] = {"max_sequences": 8, "max_context": 200, "kv_memory": 64 << 20, "max_step_tokens": 256}


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("shape") / "config.json"
    path.write_text(json.dumps(SHAPE))
    return str(path)


@pytest.fixture(autouse=True)
def _share_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_SHARE_GPUS", "1")


def built(shape: str, degree: int, *, same_bits: bool = True, drafter: str = "ngram") -> Parts:
    config = EngineConfig.of(
        device="cuda", **OPTIONS, tensor_parallel=degree, same_bits_across_degrees=same_bits, rank_timeout=8.0
    )
    return assemble(shape, drafters=drafter.format(shape).split(), device="cuda", config=config)


def requests(count: int) -> list[Request]:
    random = np.random.default_rng(5)
    return [
        Request(
            id=str(i),
            prompt=prompt(int(random.integers(1, 60)), seed=i, repeat=i % 3 == 0),
            sampling=replace(random_params(random), max_tokens=12),
            speculation=OFF if i % 4 == 3 else Speculation(max_draft=2 + i % 4),
        )
        for i in range(count)
    ]


def answers(parts: Parts, asked: Sequence[Request]) -> dict[str, Any]:
    """Answer all requests in batches; return tokens and log-probabilities of each."""
    said: dict[str, tuple[list[Any], list[Any]]] = {request.id: ([], []) for request in asked}
    for request in asked:
        parts.engine.submit(request)
    while parts.engine.has_work:
        for event in parts.engine.step():
            tokens, logprobs = said[event.request_id]
            tokens += event.tokens
            logprobs += event.logprobs
    assert parts.engine.failure is None
    return said


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_two_ranks_say_what_one_says(drafter: str, shape: str) -> None:
    """With the same bits across degrees, log-probabilities included; and speculation changes nothing within two."""
    asked = requests(16)
    alone = answers(built(shape, 1, drafter=drafter), asked)
    two = built(shape, 2, drafter=drafter)
    assert isinstance(two.engine._stepper._rounds, LeadingRounds)  # type: ignore[attr-defined]
    assert two.prepared is not None
    assert two.prepared.graphs > 0, "rounds meet inside recorded graphs"
    assert answers(two, asked) == alone
    assert two.engine.stats.drafted > 0
    again = [replace(one, id=f"{one.id} plain", speculation=OFF) for one in asked]
    assert {key.removesuffix(" plain"): value for key, value in answers(two, again).items()} == alone


def test_the_laws_hold_within_a_degree(shape: str) -> None:
    """Without the mode sums have the order of two ranks, and texts do not depend on drafts and neighbours."""
    asked, parts = requests(8), built(shape, 2, same_bits=False)
    together = answers(parts, asked)
    for one in asked:
        own = replace(one, id=f"{one.id} alone", speculation=OFF)
        assert answers(parts, [own])[own.id] == together[one.id]


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_is_lost(sent: signal.Signals, shape: str) -> None:
    parts = built(shape, 2)
    rounds = parts.engine._stepper._rounds  # type: ignore[attr-defined]
    [pid] = rounds._ranks.pids().values()
    for request in requests(4):
        parts.engine.submit(request)
    parts.engine.step()
    os.kill(pid, sent)
    began = time.monotonic()
    while parts.engine.has_work:
        parts.engine.step()
    assert isinstance(parts.engine.failure, RankLost)
    assert str(parts.engine.failure) == ("rank 1 was killed by SIGKILL" if sent == signal.SIGKILL else STUCK)
    assert time.monotonic() - began < (10 if sent is signal.SIGSTOP else 3)


def test_more_ranks_than_gpus(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_SHARE_GPUS")
    with pytest.raises(InvalidRequest, match="tensor_parallel 2: each rank needs a GPU, and torch finds 1"):
        built(shape, 2)
