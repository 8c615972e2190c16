"""Drafts of a compiled model: one call gives the tokens that the host would draw one by one, and siblings of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.draft import Draft
from paceline.drafters.base import Ask, Drafter
from paceline.drafters.model import ModelDrafter, count_read
from paceline.drafters.recipe import BuildContext
from paceline.errors import InvalidRequest
from paceline.kernels.base import PAGE_SIZE, Batch
from paceline.kv.pages import PagePool
from paceline.runner.batch import Share
from paceline.runner.forwards.compiled import CompiledForward
from paceline.runner.heads.trees import OF_MODEL
from paceline.runner.lanes import Lanes
from paceline.sampling.sampler import Sampler
from paceline.types import Request, SamplingParams
from tests.rig import Rig, build
from tests.runs import Run, prompt
from tests.tiny_models import NOISY, VOCAB, Model

LENGTHS = (20, 30)  # committed tokens of two sequences; drafts of the second one cross a page


def alone(model: Model = NOISY, *, one_call: bool = True, **options: Any) -> tuple[ModelDrafter, Lanes]:
    """A compiled draft model with two sequences, which drafts in one call or token by token."""
    lanes = Lanes(count=2, max_context=80, max_draft=16)
    lanes.tokens_np[:] = np.random.default_rng(0).integers(0, VOCAB, lanes.tokens_np.shape)
    pool = PagePool(12)
    for lane, length in enumerate(LENGTHS):
        lanes.lengths_np[lane] = length
        lanes.pages_np[lane, :6] = pool.take(6)
    forward = model.forward("compiled", num_pages=12)
    drafter = ModelDrafter(
        forward, lanes=lanes, pool=pool, vocab_size=VOCAB, chunk=64, **{"min_confidence": 0.0, **options}
    )
    assert drafter._trees is not None
    if not one_call:
        drafter._trees = None
    for key, length in enumerate(LENGTHS):
        drafter.start(key, key, lanes.tokens_np[key, :length])
    return drafter, lanes


def asks(lanes: Lanes, *, longest: int = 5, price: float = 0.0, **params: Any) -> list[Ask]:
    samplers = [Sampler(SamplingParams(**params), seed=seed, vocab_size=VOCAB, eos_ids=()) for seed in (4, 9)]
    return [
        Ask(key, key, lanes.tokens_np[key, :length], longest, sampler, price=price, row_price=price / 3)
        for key, (length, sampler) in enumerate(zip(LENGTHS, samplers, strict=True))
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_one_call_draws_what_the_host_would(temperature: float) -> None:
    """Same tokens, greedy and with the target's noise at each position."""
    both = [alone(one_call=one_call, branches=1) for one_call in (True, False)]
    fast, slow = (drafter.propose(asks(lanes, temperature=temperature)) for drafter, lanes in both)
    assert [draft.tokens for draft in fast] == [draft.tokens for draft in slow]
    assert [len(draft.tokens) for draft in fast] == [5, 5]
    assert [draft.passes for draft in fast] == [5, 5]


def test_siblings_are_not_read() -> None:
    """A pass reads one node of each level: keys and values lie at their own positions."""
    drafter, lanes = alone(branches=3)
    for draft in drafter.propose(asks(lanes, longest=8, temperature=0)):
        levels = [depth(draft, parent) for parent in set(draft.parents) - {-1}]
        assert draft.parents
        assert len(levels) == len(set(levels))
        assert draft.passes is not None
        assert len(levels) < draft.passes <= 8


def depth(draft: Draft, node: int) -> int:
    return 0 if node < 0 else 1 + depth(draft, draft.parents[node])


@pytest.mark.parametrize(
    ("accepted", "read"), [([], 0), ([5], 1), ([5, 6], 2), ([5, 7], 1), ([5, 6, 8], 2), ([3], 0), ([5, 9], 1)]
)
def test_accepted_tokens_that_were_read(accepted: list[int], read: int) -> None:
    tree = Draft((5, 3, 6, 7, 8), (-1, -1, 0, 0, 2))
    assert count_read(tree, accepted) == read
    assert count_read(Draft((5, 6, 8)), accepted) == min(read, 2)


@pytest.mark.parametrize("vocab", [60, 128])
@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_padded_vocabularies(vocab: int, temperature: float) -> None:
    """Whatever a larger or smaller vocabulary draws is a token of both."""
    drafter, lanes = alone(Model(seed=5, vocab_size=vocab))
    lanes.tokens_np[0, 19] = VOCAB - 1  # a smaller one has no embedding for it
    for draft in drafter.propose(asks(lanes, longest=8, temperature=temperature)):
        assert len(draft.tokens) == 8
        assert max(draft.tokens) < min(vocab, VOCAB)


def test_prices_end_drafts() -> None:
    lengths = []
    for price in (0.001, 0.05, 0.9):
        drafter, lanes = alone(min_confidence=None)
        lengths.append(
            [len(draft.tokens) for draft in drafter.propose(asks(lanes, longest=8, price=price, temperature=0))]
        )
    assert lengths[0] == [8, 8]
    assert lengths[2] == [1, 1]
    assert lengths[0] > lengths[1] >= lengths[2]


def test_a_dear_row_before_cheap_ones_is_weighed_with_them() -> None:
    """The second row does not pay alone. It does with the third if that is free."""
    passes = []
    for third in (0.0, 0.9):
        drafter, lanes = alone(min_confidence=None, branches=1)
        [first, _] = asks(lanes, longest=3, temperature=0)
        sure = first_confidence(drafter, first)
        priced = replace(first, price=0.1 * sure, row_price=0.0, row_prices=(0.0, 1.05 * sure, third * sure))
        passes.append(drafter.propose([priced])[0].passes)
    assert passes == [3, 1]


def first_confidence(drafter: ModelDrafter, first: Ask) -> float:
    """Confidence in the first token of a greedy draft, as kernels/cpu/candidates.c estimates it."""
    output = drafter.compute([Share(lane=first.lane, start=0, count=len(first.tokens))])
    odds = torch.softmax(output.logits[0], dim=0).max().logit()
    return float(torch.sigmoid(OF_MODEL.odds_slope * odds + OF_MODEL.odds_offset))


def test_a_request_has_a_limit_of_its_own() -> None:
    drafter, lanes = alone()
    first, second = asks(lanes, temperature=0)
    assert [len(draft.tokens) for draft in drafter.propose([replace(first, p_min=1.0), second])] == [1, 5]


@pytest.mark.parametrize("options", [{"branches": 0}, {"branches": 9}, {"max_draft": 0}, {"min_confidence": 2.0}])
def test_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(options))):
        alone(**options)


class Watched:
    """Makes a compiled draft model of trees, and compares its keys and values with a fresh pass."""

    def make(self, context: BuildContext, backend: str) -> Drafter:
        self.drafter = ModelDrafter(
            NOISY.forward("compiled", num_pages=context.pool.num_pages),
            lanes=context.lanes,
            pool=context.pool,
            vocab_size=context.vocab_size,
            chunk=24,
            branches=3,
            min_confidence=0.0,
        )
        return self.drafter

    def check(self, rig: Rig) -> int:
        """Return how many positions were compared."""
        compared = 0
        for sequence in rig.engine._scheduler.running:
            known = self.drafter._states[sequence.key].follower.known
            assert sequence.span is not None
            slots = torch.as_tensor(rig.cache.slots(sequence.span, 0, known), dtype=torch.int32)
            if known:
                found = self.drafter.forward.kv.read(slots)
                for part, wanted in zip(found, fresh(sequence.tokens[:known]), strict=True):
                    assert torch.equal(part, wanted)
            compared += known
        return compared


def fresh(tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the draft model over these tokens, read in one pass."""
    count = len(tokens)
    forward = NOISY.forward("compiled", num_pages=-(-count // PAGE_SIZE))
    assert isinstance(forward, CompiledForward)
    places = torch.arange(count, dtype=torch.int32)
    ends = torch.tensor([0, count], dtype=torch.int32)
    table = torch.arange(forward.kv.num_pages, dtype=torch.int32)[None]
    forward(Batch(torch.tensor(tokens, dtype=torch.int32), places, places, ends, ends[1:], table, places[-1:]))
    return forward.kv.read(places)


def test_keys_and_values_stay_in_step() -> None:
    """After accepted siblings, rejected tokens and full drafts the model has read exactly the committed tokens."""
    watched = Watched()
    rig = build("compiled", {"model": watched.make})
    going = Run(rig)
    going.submit(
        [
            Request(
                id=str(i),
                prompt=prompt(20 + 7 * i, seed=i),
                sampling=SamplingParams(max_tokens=24, temperature=i, seed=i),
            )
            for i in range(2)
        ]
    )
    compared = 0
    while rig.engine.has_work:
        going.step()
        compared += watched.check(rig)
    going.finish()
    assert rig.engine.drafters["model"].out is None
    assert compared > 300
    assert rig.engine.stats.accepted > 10
