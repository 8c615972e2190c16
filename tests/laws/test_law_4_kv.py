"""Law 4: after any walk of accepts and rejects the KV cache equals a fresh prefill of the same tokens, no page is lost,
and no rejected token ever reaches the prefix cache."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.kernels.base import PAGE_SIZE, Forward
from paceline.runner.batch import Share, build_batch
from paceline.runner.lanes import Lanes
from paceline.types import Request, Rule, Speculation
from tests.laws import under_law
from tests.rig import Rig, build
from tests.rig_drafters import DEVICE_RIGS, RIGS, SELF
from tests.runs import Key, Run, Told, run, tokens_of
from tests.tiny_models import BACKENDS, CONTEXT, TARGET

WALKS = ("chain", "tree", "bushy-tree", "noisy", "layers", "self-on-host")


@functools.cache
def fresh_forward(backend: str) -> Forward:
    return TARGET.forward(backend, num_pages=CONTEXT // PAGE_SIZE)


def fresh_kv(backend: str, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Keys and values of the tokens as one pass computes them, in pages of another order."""
    pages, forward = -(-len(tokens) // PAGE_SIZE), fresh_forward(backend)
    lanes = Lanes(count=1, max_context=len(tokens), max_draft=0)
    lanes.tokens_np[0, : len(tokens)] = tokens
    lanes.pages_np[0, :pages] = np.arange(pages)[::-1]
    batch = build_batch(lanes, [Share(lane=0, start=0, count=len(tokens))])
    forward(batch)
    return forward.kv.read(batch.slots)


def assert_same_kv(rig: Rig, backend: str, slots: np.ndarray, tokens: Sequence[int]) -> None:
    if not len(slots):
        return
    held = rig.forward.kv.read(torch.tensor(slots, dtype=torch.int32))
    for mine, theirs in zip(held, fresh_kv(backend, tokens[: len(slots)]), strict=True):
        if rig.forward.bitwise:
            assert torch.equal(mine, theirs)
        else:
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def assert_running_kv(rig: Rig, backend: str) -> None:
    for sequence in rig.engine._scheduler.running:
        assert sequence.span is not None
        slots = rig.cache.slots(sequence.span, 0, sequence.span.committed)
        assert_same_kv(rig, backend, slots, sequence.tokens)


def assert_remembered(rig: Rig, backend: str, asked: Sequence[Request], told: Mapping[Key, Told]) -> None:
    """Every page of the prefix cache belongs to a text that was really said, and holds its keys and values."""
    salts = {request.id: request for request in asked}
    reached: set[int] = set()
    for (request_id, _), each in told.items():
        request = salts[request_id]
        tokens = [*request.prompt, *each.tokens, 0]
        span = rig.cache.open(np.array(tokens), salt=request.cache_salt)
        assert_same_kv(rig, backend, rig.cache.slots(span, 0, span.committed), tokens)
        reached |= set(span.pages)
        rig.cache.close(span)
    assert reached == set(rig.cache.pool._digest_of), "a page is remembered for a text that nobody said"
    assert len(reached) >= 5


def walk(rig: Rig, backend: str, asked: Sequence[Request]) -> dict[Key, Told]:
    going = Run(rig)
    going.submit(asked)
    while rig.engine.has_work:
        going.step()
        if going.steps % 6 == 0:
            assert_running_kv(rig, backend)
    return going.finish()


@pytest.mark.parametrize(
    ("backend", "name", "law"),
    [
        *(("toy", name, law) for name in WALKS for law in ("greedy", "sampled")),
        *(("compiled", name, "sampled") for name in WALKS),
        ("eager", "tree", "sampled"),
        ("eager", "layers", "sampled"),
    ],
)
def test_a_walk_leaves_the_kv_of_a_prefill(backend: str, name: str, law: str) -> None:
    rig = build(backend, {name: under_law.made(name, backend, law)})
    asked = [replace(r, cache_salt=str(i % 2)) for i, r in enumerate(under_law.requests(law, (Rule.COUPLED,)))]
    told = walk(rig, backend, asked)
    assert tokens_of(told) == tokens_of(under_law.plain_answers(backend, law))
    assert 0 < rig.engine.stats.accepted < rig.engine.stats.drafted
    if law == "sampled":  # after a stop id accepted tokens may be committed that nobody hears
        assert_remembered(rig, backend, asked, told)


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *((backend, name) for backend in BACKENDS for name in ("noisy", "ngram", "portfolio-model")),
        *((backend, name) for backend in BACKENDS[:2] for name in ("portfolio", "portfolio-by-seats")),
        ("toy", "self"),
        ("eager", "self"),
    ],
)
def test_a_walk_on_a_device_leaves_the_kv_of_a_prefill(backend: str, name: str) -> None:
    rig = build(backend, on_device={name: {**DEVICE_RIGS, **SELF}[name]})
    asked = [replace(r, cache_salt=str(i % 2)) for i, r in enumerate(under_law.device_requests("sampled"))]
    # Beyond a stop or a limit, accepted tokens may be committed that nobody hears: none of these fills a page.
    asked = [replace(r, sampling=replace(r.sampling, stop_ids=(), max_tokens=17)) for r in asked]
    told = walk(rig, backend, asked)
    assert 0 < rig.engine.stats.accepted < rig.engine.stats.drafted
    assert_remembered(rig, backend, asked, told)


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_later_requests_build_on_what_a_device_committed(backend: str) -> None:
    """Also the drafter: it has read the shared pages for another, and is right as if it had read them itself."""
    first = [replace(r, speculation=Speculation()) for r in under_law.device_requests("greedy")]
    rig = build(backend, on_device={"good": TARGET})
    told = run(rig, first)
    second = [
        replace(request, id="again" + request.id, prompt=(*request.prompt, *told[request.id, 0].tokens[:-1], 7))
        for request in first
    ]
    drafted = rig.engine.stats.drafted
    shared = run(rig, second)
    assert tokens_of(shared) == tokens_of(run(build(backend, prefix_cache=False), second))
    assert max(shared[request.id, 0].stats.cached_tokens for request in second) >= 2 * PAGE_SIZE
    assert rig.engine.stats.accepted == rig.engine.stats.drafted > drafted


@pytest.mark.parametrize("backend", BACKENDS[:2])
@pytest.mark.parametrize("name", ["tree", "noisy"])
def test_later_requests_build_on_what_was_committed(backend: str, name: str) -> None:
    """A second turn, whose prompt is the first turn and its answer, says the same as without a prefix cache."""
    first = under_law.requests("sampled", (Rule.COUPLED,))
    made = under_law.made(name, backend, "sampled")
    rig = build(backend, {name: made})
    told = run(rig, first)
    second = [
        replace(request, id="again" + request.id, prompt=(*request.prompt, *told[request.id, 0].tokens[:-1], 7))
        for request in first
    ]
    shared = run(rig, second)
    assert tokens_of(shared) == tokens_of(run(build(backend, {name: made}, prefix_cache=False), second))
    cached = [shared[request.id, 0].stats.cached_tokens for request in second]
    lengths = [len(request.prompt) for request in second]
    assert cached == [(length - 1) // PAGE_SIZE * PAGE_SIZE for length in lengths]
    assert max(cached) >= 2 * PAGE_SIZE


def test_salts_do_not_share() -> None:
    rig = build("toy", RIGS["model"])
    request = under_law.requests("sampled", (Rule.COUPLED,))[1]
    assert len(request.prompt) > PAGE_SIZE
    salts = ["", "a", "b", "a", ""]
    cached = [
        run(rig, [replace(request, id=str(i), cache_salt=salt)])[str(i), 0].stats.cached_tokens
        for i, salt in enumerate(salts)
    ]
    most = (len(request.prompt) - 1) // PAGE_SIZE * PAGE_SIZE
    assert cached == [0, 0, 0, most, most]


def test_a_rejected_draft_is_forgotten_when_it_fills_a_page() -> None:
    """A wrong draft across the end of a page: the page becomes final later, with the right tokens."""
    backend, count = "toy", 4
    rig = build(backend, {"bad": RIGS["model"]["bad"]}, min_acceptance=0.0, max_draft=16)
    asked = under_law.requests("greedy", (Rule.COUPLED,), count=count)[:2]
    told = run(rig, asked)
    assert_remembered(rig, backend, asked, told)


def test_pages_run_out_and_come_back() -> None:
    """Walks with preemptions and evictions; `Run` checks the cache after every step."""
    rig = build("toy", {"tree": under_law.made("tree", "toy", "sampled")}, num_pages=CONTEXT // PAGE_SIZE + 2)
    for turn in range(3):
        asked = [replace(r, id=f"{turn}-{r.id}") for r in under_law.requests("sampled", (Rule.COUPLED,))]
        told = {key[0][2:]: each.tokens for key, each in run(rig, asked).items() if key[1] == 0}
        plain = under_law.plain_answers("toy", "sampled")
        assert told == {key[0]: each.tokens for key, each in plain.items() if key[1] == 0}
    assert rig.engine.stats.preemptions > 0


def test_pages_run_out_under_flights() -> None:
    rig = build("toy", on_device={"noisy": DEVICE_RIGS["noisy"]}, num_pages=CONTEXT // PAGE_SIZE + 2)
    plain = under_law.plain_device_answers("toy", "sampled")
    for turn in range(3):
        asked = [replace(r, id=f"{turn}-{r.id}") for r in under_law.device_requests("sampled")]
        told = {(key[0][2:], key[1]): each.tokens for key, each in run(rig, asked).items()}
        assert told == tokens_of(plain)
    assert rig.engine.stats.preemptions > 0
