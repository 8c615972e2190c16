"""The draft model: its keys and values are in step with the committed tokens, whatever was accepted.

The toy model's "keys and values" are tokens and positions, so that being in step can be read off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.drafters.base import Ask, Drafter
from paceline.drafters.model import ModelDrafter
from paceline.drafters.registry import BuildContext
from paceline.kernels.base import PAGE_SIZE, Batch, Output
from paceline.kv.pages import PagePool
from paceline.rules import BUILT_IN
from paceline.runner.lanes import Lanes
from paceline.sampling.sampler import Sampler, Stream, noise_keys
from paceline.types import Request, Rule, SamplingParams, Speculation
from tests.rig import Rig, build
from tests.runs import Run, prompt, run
from tests.toy import ToyForward


class Watched(ToyForward):
    """Remembers the rows of each pass, by sequence."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.passes: list[list[int]] = []

    def __call__(self, batch: Batch) -> Output:
        self.passes.append(batch.row_starts.diff().tolist())
        return super().__call__(batch)


class Lookout:
    """Makes a draft model of the toy kind and keeps hold of it."""

    def __init__(self, *, noise: float = 0.0, seed: int = 0, chunk: int = 32, vocab_size: int = 97) -> None:
        self.options = {"noise": noise, "seed": seed, "vocab_size": vocab_size}
        self.chunk = chunk
        self.forward: Watched
        self.drafter: ModelDrafter

    def make(self, context: BuildContext, backend: str) -> Drafter:
        self.forward = Watched(num_pages=context.pool.num_pages, **self.options)
        self.drafter = ModelDrafter(
            self.forward,
            lanes=context.lanes,
            pool=context.pool,
            vocab_size=context.vocab_size,
            chunk=self.chunk,
            min_confidence=0,  # full drafts, whatever the toy believes
        )
        return self.drafter

    def check(self, rig: Rig) -> None:
        """What it takes to be in step, is."""
        for sequence in rig.engine._scheduler.running:
            known_to = self.drafter._states[sequence.key].follower.known
            assert 0 <= known_to <= len(sequence.tokens)
            assert sequence.span is not None
            slots = rig.cache.slots(sequence.span, 0, known_to)
            known = [min(token, self.forward.vocab_size - 1) for token in sequence.tokens[:known_to]]
            assert self.forward._kv.tokens[slots].tolist() == known
            assert self.forward._kv.positions[slots].tolist() == list(range(known_to))
        assert self.drafter._states.keys() <= {sequence.key for sequence in rig.engine._scheduler.running}


def requests(count: int, *, length: int = 20, tokens: int = 30, **params: Any) -> list[Request]:
    return [
        Request(
            id=str(i),
            prompt=prompt(length + 7 * i, seed=i % 3),
            sampling=SamplingParams(**{"seed": i, "max_tokens": tokens, **params}),
        )
        for i in range(count)
    ]


def follow(rig: Rig, lookout: Lookout, asked: list[Request]) -> Run:
    going = Run(rig)
    going.submit(asked)
    while rig.engine.has_work:
        going.step()
        lookout.check(rig)
    going.finish()
    assert rig.engine.drafters["model"].out is None
    return going


OPTIONS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "always right": ({}, {}),
    "sometimes right": ({"noise": 0.2}, {}),
    "always wrong": ({"seed": 5}, {"min_acceptance": 0.0}),
    "small chunks": ({"noise": 0.1, "chunk": 9}, {}),
    "few pages": ({"noise": 0.1}, {"num_pages": 13}),
    "few rows": ({"noise": 0.1}, {"max_step_tokens": 9}),
    "no prefix cache": ({"noise": 0.1}, {"prefix_cache": False}),
    "narrow": ({"seed": 5, "vocab_size": 60}, {}),
    "wide": ({"seed": 5, "vocab_size": 120}, {}),
}


@pytest.mark.unwatched
@pytest.mark.parametrize("case", OPTIONS)
def test_in_step(case: str) -> None:
    of_drafter, of_engine = OPTIONS[case]
    lookout = Lookout(**of_drafter)
    rig = build("toy", {"model": lookout.make}, **of_engine)
    follow(rig, lookout, requests(6))
    follow(rig, lookout, [Request(id="again", prompt=prompt(20, seed=0), sampling=SamplingParams(max_tokens=9))])
    assert (rig.engine.stats.preemptions > 0) == (case == "few pages")
    assert rig.engine.stats.drafted > 50
    assert max(map(sum, lookout.forward.passes)) <= lookout.chunk


def first_passes(lookout: Lookout) -> list[int]:
    """Rows of the first pass of each round, for one sequence: the passes that are not a single drafted token."""
    return [rows[0] for rows in lookout.forward.passes]


def test_after_full_acceptance_the_last_token_and_the_bonus_are_missing() -> None:
    lookout = Lookout()
    rig = build("toy", {"model": lookout.make}, max_draft=4)
    run(rig, requests(1, length=10, tokens=21, temperature=0))
    assert rig.engine.stats.accepted == rig.engine.stats.drafted
    passes = first_passes(lookout)
    # The first token is the target's own; then four rounds of 4 + 1 tokens, each with 4 passes of the drafter.
    assert passes == [11, 1, 1, 1] + 3 * [2, 1, 1, 1]
    assert rig.engine.stats.steps == 5


def test_after_a_rejection_only_the_new_token_is_missing() -> None:
    lookout = Lookout(seed=5)
    rig = build("toy", {"model": lookout.make}, min_acceptance=0.0, max_draft=2)
    told = run(rig, requests(1, length=10, tokens=8, temperature=0))
    assert told["0", 0].stats.accepted == 0
    assert first_passes(lookout) == [11] + [1] * 10  # five rounds of two, and one before the last token


def test_a_known_prefix_is_not_computed_again() -> None:
    lookout = Lookout()
    rig = build("toy", {"model": lookout.make}, max_draft=2)
    run(rig, requests(1, length=50, tokens=4))
    lookout.forward.passes.clear()
    run(rig, [Request(id="again", prompt=prompt(50, seed=0), sampling=SamplingParams(max_tokens=4))])
    assert first_passes(lookout)[0] == 51 - 3 * PAGE_SIZE


def test_a_prefix_that_only_the_target_knows_is_computed() -> None:
    """The first request does not draft: its pages hold nothing of the drafter's."""
    lookout = Lookout()
    rig = build("toy", {"model": lookout.make}, max_draft=2)
    (first,) = requests(1, length=50, tokens=4)
    run(rig, [Request(id="off", prompt=first.prompt, sampling=first.sampling, speculation=Speculation(enabled=False))])
    told = run(rig, [first])
    assert told["0", 0].stats.cached_tokens == 3 * PAGE_SIZE
    assert lookout.forward.passes[0] == [32]
    assert rig.engine.stats.accepted == rig.engine.stats.drafted


def test_a_prompt_longer_than_the_chunk_drafts_a_little_later() -> None:
    lookout = Lookout(chunk=8)
    rig = build("toy", {"model": lookout.make})
    told = run(rig, requests(1, length=30, tokens=30, temperature=0))
    assert lookout.forward.passes[:4] == [[8], [8], [8], [8]]
    assert told["0", 0].stats.drafted == told["0", 0].stats.accepted > 10


def ask(lanes: Lanes, rule: Rule, *, key: int = 0, longest: int = 3, **params: Any) -> Ask:
    sampler = Sampler(SamplingParams(**params), seed=4, vocab_size=97, eos_ids=())
    length = int(lanes.lengths_np[key])
    return Ask(key=key, lane=key, tokens=lanes.tokens_np[key, :length], max_draft=longest, sampler=sampler, rule=rule)


def alone(*, min_confidence: float = 0, **options: Any) -> tuple[ModelDrafter, Lanes, ToyForward]:
    lanes = Lanes(count=2, max_context=60, max_draft=8)
    lanes.tokens_np[:] = np.arange(lanes.tokens_np.size).reshape(lanes.tokens_np.shape) % 50
    lanes.lengths_np[:] = 20
    pool = PagePool(10)
    for lane in range(2):
        lanes.pages_np[lane, :3] = pool.take(3)
    forward = ToyForward(num_pages=10, **options)
    drafter = ModelDrafter(forward, lanes=lanes, pool=pool, vocab_size=97, chunk=64, min_confidence=min_confidence)
    for key in range(2):
        drafter.start(key, key, lanes.tokens_np[key, :20])
    return drafter, lanes, forward


def test_rejection_asks_for_distributions() -> None:
    """Tokens drawn with the drafter's own noise, from the distributions it reports; coupled drafts report none."""
    drafter, lanes, forward = alone()
    asks = [ask(lanes, Rule.REJECTION, temperature=1.3, top_k=9), ask(lanes, Rule.COUPLED, key=1, longest=2)]
    drafts = drafter.propose(asks)
    assert [len(draft) for draft in drafts] == [3, 2]
    assert drafts[1].probs is None
    assert drafts[0].probs is not None
    tokens = lanes.tokens_np[0, :20].tolist()
    for place, token in enumerate(drafts[0].tokens):
        logits = torch.from_numpy(forward.logits_after(np.array(tokens)))[None]
        torch.testing.assert_close(drafts[0].probs[place], asks[0].sampler.probs(logits)[0])
        keys = noise_keys(4, np.array([(20 << 32) + 20 + place]), Stream.DRAFT)
        drawn = forward.pick(asks[0].sampler.shape(logits), torch.ones(1), torch.from_numpy(keys))
        assert drawn.tolist() == [token]
        tokens.append(token)
    assert drafts[0].problem(vocab_size=97, max_length=3) is None


def test_a_greedy_request_needs_no_distributions() -> None:
    drafter, lanes, _ = alone()
    assert drafter.propose([ask(lanes, Rule.REJECTION, temperature=0)])[0].probs is None


@pytest.mark.parametrize(("vocab", "rule"), [(v, r) for v in (60, 120) for r in BUILT_IN])
def test_padded_vocabularies(vocab: int, rule: Rule) -> None:
    """Larger than the target's: cut. Smaller: the missing tokens are impossible."""
    drafter, lanes, _ = alone(vocab_size=vocab)
    draft = drafter.propose([ask(lanes, rule, temperature=5.0, longest=8)])[0]
    assert draft.problem(vocab_size=97, max_length=8) is None
    assert max(draft.tokens) < min(vocab, 97)
    if draft.probs is not None:
        assert draft.probs.shape == (8, 97)
        assert float(draft.probs[:, vocab:].sum()) == 0


def test_parameters_act_along_the_draft() -> None:
    """Penalties see the tokens drafted before."""
    drafter, lanes, _ = alone()
    draft = drafter.propose([ask(lanes, Rule.COUPLED, temperature=0, presence_penalty=100.0, longest=8)])[0]
    assert len(set(draft.tokens)) == 8
    draft = drafter.propose([ask(lanes, Rule.COUPLED, key=1, allowed_tokens=(3, 4), longest=8)])[0]
    assert set(draft.tokens) <= {3, 4}


def test_a_draft_ends_where_its_drafter_stops_believing_in_it() -> None:
    """The threshold lies between what it believes of the first token and of the first two: the third is not drawn."""
    drafter, lanes, forward = alone()
    full = drafter.propose([ask(lanes, Rule.COUPLED, temperature=0)])[0]
    probabilities, tokens = [], lanes.tokens_np[0, :20].tolist()
    for token in full.tokens:
        logits = torch.from_numpy(forward.logits_after(np.array(tokens)))
        probabilities.append(float(torch.softmax(logits, dim=0)[token]))
        tokens.append(token)
    hesitant, lanes, _ = alone(min_confidence=(probabilities[0] + probabilities[0] * probabilities[1]) / 2)
    draft = hesitant.propose([ask(lanes, Rule.COUPLED, temperature=0)])[0]
    assert len(full) == 3
    assert draft.tokens == full.tokens[:2]


def test_a_request_has_a_limit_of_its_own() -> None:
    """Instead of the drafter's, higher or lower; beside one in the same pass that has none."""
    for own, asked, lengths in ((0.0, 1.0, [1, 3]), (1.0, 0.0, [3, 1])):
        drafter, lanes, _ = alone(min_confidence=own)
        asks = [replace(ask(lanes, Rule.COUPLED, temperature=0), p_min=asked), ask(lanes, Rule.COUPLED, key=1)]
        assert [len(draft) for draft in drafter.propose(asks)] == lengths
