"""Audits of engines made by hand: trees, ties, neighbours, and what is said of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from paceline.audit.arithmetic import Arithmetic
from paceline.audit.cases import ALONE, Group, items, variants
from paceline.audit.differences import DifferenceKind
from paceline.audit.run import Findings, Scope, audit
from paceline.errors import EngineDead
from paceline.kernels.base import Batch, Output
from paceline.kv.cache import KVCache
from paceline.prompts.files import Prompt
from paceline.types import Request, Rule, SamplingParams
from tests.odd_drafters import Scripted
from tests.rig import Rig, build
from tests.rig_drafters import RIGS, always
from tests.runs import plain, prompt, run, tokens_of
from tests.toy import ToyForward

BITWISE = Arithmetic(bitwise=True)
PROMPTS = [Prompt(id=f"p{i}", category="toy") for i in range(4)]
TOKENS = [prompt(5 + 9 * i, seed=i) for i in range(4)]


def scope(drafter: str, **options: object) -> Scope:
    given = {
        "drafters": [drafter],
        "rules": [Rule.COUPLED],
        "at_once": [1],
        "variants": variants((0.0, 1.0), edits=False, max_tokens=16),
    }
    return Scope(**(given | options))


def audited(rig: Rig, asked: Scope, *, arithmetic: Arithmetic = BITWISE) -> Findings:
    return audit(rig.engine, PROMPTS, TOKENS, asked, arithmetic=arithmetic)


def scripts() -> list[list[int]]:
    """What the toy says to everything that the audit asks."""
    todo = items(PROMPTS, TOKENS, variants((0.0, 1.0), edits=False, max_tokens=16), seed=0)
    requests = [item.request for item in todo]
    told = tokens_of(run(build("toy"), plain(requests)))
    return [[*request.prompt, *told[request.id, 0]] for request in requests]


def tree() -> Rig:
    return build("toy", {"scripted": always(Scripted(scripts(), tree=True, seed=3))})


def test_trees_are_exact() -> None:
    found = audited(tree(), scope("scripted"))
    assert found.passed
    assert found.prompts_by_worst() == {None: 4}
    assert found.drafted > sum(case.accepted for case in found.cases) > 10


def test_a_tree_that_is_not_straightened_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slots of a rejected sibling stay where the accepted one's belong."""
    monkeypatch.setattr(KVCache, "_move", lambda *_: None)
    monkeypatch.setattr(ToyForward, "_contexts_of", unchecked_contexts)
    found = audited(tree(), scope("scripted"))
    assert not found.passed
    _, judged = found.structural[0]
    assert judged.difference is not None
    assert judged.difference.expected == judged.difference.plain


def unchecked_contexts(
    self: ToyForward, batch: Batch, rows: Sequence[int], owners: Sequence[int]
) -> Iterator[np.ndarray]:
    """As the toy's own, but a context out of order goes unnoticed, as in a real model."""
    for row, owner in zip(rows, owners, strict=True):
        position, base = int(batch.positions[row]), int(batch.bases[owner])
        shared = position + 1 if batch.tails is None else min(position + 1, base)
        index = np.arange(shared)
        slots = batch.page_table[owner].numpy()[index // 16] * 16 + index % 16
        if batch.tails is not None:
            slots = np.concatenate((slots, batch.tails[row, : position + 1 - shared].numpy()))
        yield self._kv.tokens[slots]


class Wavering(ToyForward):
    """Pairs of tokens are nearly tied, and logits move by `noise` when several rows ride along."""

    bitwise = False
    noise = 0.0

    def __call__(self, batch: Batch) -> Output:
        output = super().__call__(batch)
        logits = output.logits.clone()
        logits[:, 1::2] = logits[:, :-1:2] - 1e-5  # each odd token is the even one before it, and a little less
        if len(batch.tokens) > 1:
            logits[:, 1::2] += self.noise
        self._last = Output(logits=logits, argmax=logits.argmax(-1).int())
        return self._last


def wavering(noise: float) -> Rig:
    forward = Wavering(num_pages=160)
    forward.noise = noise
    return build("toy", {"noisy": RIGS["model"]["noisy"]}, forward=forward)


FLOAT32 = Arithmetic.rounded(torch.float32, layers=30, width=1536)


def test_a_flip_within_the_arithmetic_is_a_near_tie() -> None:
    found = audited(wavering(3e-5), scope("noisy"), arithmetic=FLOAT32)
    assert found.passed
    assert found.prompts_by_worst()[DifferenceKind.NEAR_TIE] > 0
    assert not found.structural
    for _, judged in found.differences:
        assert judged.difference is not None
        assert 0 < judged.difference.gap <= judged.difference.bound < 1e-2


def test_a_flip_beyond_the_arithmetic_is_structural() -> None:
    found = audited(wavering(0.5), scope("noisy"), arithmetic=FLOAT32)
    assert not found.passed
    assert found.prompts_by_worst()[DifferenceKind.STRUCTURAL] > 0


def test_where_arithmetic_is_bitwise_no_flip_is_a_near_tie() -> None:
    found = audited(wavering(3e-5), scope("noisy"), arithmetic=BITWISE)
    assert found.structural
    assert found.prompts_by_worst()[DifferenceKind.NEAR_TIE] == 0


def test_plain_neighbours_are_compared_too() -> None:
    """A flip that others cause is told apart from one that speculation causes."""
    found = audited(wavering(3e-5), scope("noisy", at_once=[4], drafters=[]), arithmetic=FLOAT32)
    assert {case.group.drafter for case, _ in found.differences} == {None}
    assert not found.drafted


def test_distribution_rules_are_judged_by_their_distribution() -> None:
    rig = build("toy", {"noisy": RIGS["model"]["noisy"]}, num_pages=300)
    found = audited(rig, scope("noisy", rules=[Rule.REJECTION], samples=40, places=1))
    assert found.passed
    [test] = found.tests
    assert (test.rule, test.places, test.samples) == (Rule.REJECTION, 1, 40)
    assert test.proves
    sampled = next(case for case in found.cases if case.variant == "T=1" and case.group.drafter == "noisy")
    greedy = next(case for case in found.cases if case.variant == "T=0" and case.group.drafter == "noisy")
    assert (sampled.exact, greedy.exact) == (0, 4)


def test_an_engine_that_dies_ends_the_audit(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")
    rig = tree()
    monkeypatch.setattr(KVCache, "_move", lambda *_: None)  # the toy sees a context out of order
    with pytest.raises(EngineDead, match="out of order"):
        audited(rig, scope("scripted", variants=variants((0.0, 1.0), edits=False, max_tokens=16)))


def test_groups_share_no_prefix() -> None:
    todo = items(PROMPTS, TOKENS, variants((0.0,), edits=False, max_tokens=4), seed=0)
    salts = {request.cache_salt for group in (ALONE, Group("a", Rule.COUPLED, 1)) for request in group.requests(todo)}
    assert len(salts) == 2


def test_a_recorded_request_is_replayed_as_it_was() -> None:
    sampling = SamplingParams(temperature=0.3, seed=9, n=2, max_tokens=5, logprobs=3)
    recorded = Prompt(id="r", category="served", tokens=(1, 2), sampling=sampling)
    found = items([recorded], [(1, 2)], variants((0.0,), edits=True, max_tokens=4), seed=0)
    assert [item.variant for item in found] == ["recorded"] * 2
    first, second = (item.request.sampling for item in found)
    assert (first.temperature, first.seed, first.n, first.max_tokens) == (0.3, 9, 1, 5)
    told = tokens_of(run(build("toy"), plain([Request(id="both", prompt=(1, 2), sampling=sampling)])))
    apart = tokens_of(run(build("toy"), plain([item.request for item in found])))
    assert second.seed != 9
    assert list(told.values()) == list(apart.values())


def test_a_probe_knows_what_comes_next() -> None:
    rig = build("toy")
    request = Request(id="r", prompt=TOKENS[2], sampling=SamplingParams(temperature=1, seed=3, max_tokens=8, top_k=9))
    [told] = tokens_of(run(rig, plain([request]))).values()
    for i in range(8):
        found = rig.engine.probes.at(request, told[:i])
        assert (found.token, found.position) == (told[i], len(TOKENS[2]) + i)
    whole = rig.engine.probes.logits_after(TOKENS[3])
    assert torch.equal(whole, rig.engine.probes.logits_after(TOKENS[3], chunk=3))
    rig.engine.check()
    assert rig.lanes.free == len(rig.lanes.lengths)


def test_a_probe_is_refused_while_somebody_runs() -> None:
    rig = build("toy")
    rig.engine.submit(Request(id="r", prompt=TOKENS[2], sampling=SamplingParams(max_tokens=8)))
    rig.engine.step()
    with pytest.raises(AssertionError, match="idle"):
        rig.engine.probes.logits_after(TOKENS[3])
