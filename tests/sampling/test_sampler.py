"""Sampling against straightforward definitions: filters, penalties, masks, noise, log-probabilities."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Sequence
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from paceline.kernels.noise import gumbel_noise, pick
from paceline.sampling.sampler import (
    RowGroup,
    Sampler,
    Stream,
    logprobs_of,
    noise_keys,
    sample,
    sample_seed,
    uniforms,
)
from paceline.types import SamplingParams
from tests.laws.chi_squared import p_value

VOCAB = 30


def sampler(*, seed: int = 1, eos_ids: Sequence[int] = (), vocab: int = VOCAB, **params: Any) -> Sampler:
    return Sampler(SamplingParams(**params), seed=seed, vocab_size=vocab, eos_ids=eos_ids)


def logits(seed: int, rows: int = 1, vocab: int = VOCAB) -> Tensor:
    return 2 * torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed))


# ── filters ──


def kept_by_hand(row: list[float], *, top_k: int, top_p: float, min_p: float) -> set[int] | None:
    """The tokens that stay, in the order min-p, top-k, top-p; None where rounding may decide."""
    left = sorted(range(len(row)), key=lambda token: -row[token])
    if min_p:
        if any(abs(row[token] - row[left[0]] - math.log(min_p)) < 1e-4 for token in left):
            return None
        left = [token for token in left if row[token] >= row[left[0]] + math.log(min_p)]
    if top_k:
        left = left[:top_k]
    if top_p < 1:
        weights = [math.exp(row[token] - row[left[0]]) for token in left]
        reached = [0.0, *itertools.accumulate(weight / sum(weights) for weight in weights)]
        if any(abs(each - top_p) < 1e-4 for each in reached):
            return None
        left = [token for token, before in zip(left, reached, strict=False) if before < top_p]
    return set(left)


@hypothesis.given(
    st.integers(0, 2**31),
    st.sampled_from([0, 1, 2, 5, 29, 30, 500]),
    st.sampled_from([1.0, 0.95, 0.5, 0.1, 1e-6]),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    st.sampled_from([0.3, 1.0, 4.0]),
)
@hypothesis.settings(max_examples=100, deadline=None)
def test_filters(seed: int, top_k: int, top_p: float, min_p: float, temperature: float) -> None:
    given_logits = logits(seed, rows=3)
    one = sampler(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    shaped = one.shape(given_logits)
    for row, before in zip(shaped, given_logits, strict=True):
        scaled = (before.double() / temperature).tolist()
        expected = kept_by_hand(scaled, top_k=top_k, top_p=top_p, min_p=min_p)
        if expected is not None:
            assert set(row.isfinite().nonzero()[:, 0].tolist()) == expected
        kept = row.isfinite()
        torch.testing.assert_close(row[kept], before[kept] / temperature)
    torch.testing.assert_close(one.probs(given_logits), shaped.softmax(-1))


def test_ties_stay_in() -> None:
    row = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0]])
    assert sampler(vocab=5, top_k=2).shape(row).isfinite().tolist() == [[True, True, True, True, False]]
    assert sampler(vocab=5, top_p=0.6).shape(row).isfinite().tolist() == [[True, True, True, True, False]]
    assert sampler(vocab=5, min_p=math.exp(-1)).shape(row).isfinite().tolist() == [[True, True, True, True, False]]


@pytest.mark.parametrize("top_p", [0.02, 0.5, 0.999])
def test_a_flat_distribution_needs_more_than_the_first_candidates(top_p: float) -> None:
    row = 0.01 * logits(0, vocab=5000)
    kept = sampler(vocab=5000, top_p=top_p).shape(row).isfinite()
    mass = float(row.softmax(-1)[kept].sum())
    assert mass == pytest.approx(top_p, abs=3e-4)
    assert float(row[kept].min()) > float(row[~kept].max())


def test_masked_tokens_stay_masked() -> None:
    row = logits(3)
    row[:, 5:] = -torch.inf
    for params in ({"top_k": 10}, {"top_p": 0.999}, {"min_p": 1e-9}):
        assert not sampler(**params).shape(row)[:, 5:].isfinite().any()


# ── penalties, bias, masks ──


def penalised_by_hand(row: list[float], prompt: Sequence[int], output: Sequence[int], params: SamplingParams) -> Any:
    edited = list(row)
    for token in range(len(row)):
        if token in prompt or token in output:
            factor = params.repetition_penalty
            edited[token] = edited[token] / factor if edited[token] > 0 else edited[token] * factor
        count = list(output).count(token)
        edited[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        edited[token] += params.logit_bias.get(token, 0.0)
        if params.allowed_tokens is not None and token not in params.allowed_tokens:
            edited[token] = -math.inf
    return edited


EDITS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.1},
    {"frequency_penalty": -0.8},
    {"repetition_penalty": 1.3, "presence_penalty": -0.4, "frequency_penalty": 0.9, "logit_bias": {3: 4.0, 4: -4.0}},
    {"logit_bias": {0: 1.0, 29: -1000.0}},
    {"allowed_tokens": (2, 3, 5), "logit_bias": {2: 2.0, 7: 50.0}},
]


@pytest.mark.parametrize("params", EDITS)
def test_edits(params: dict[str, Any]) -> None:
    """A row of a draft is edited as if its ancestors had been committed."""
    one = sampler(**params)
    prompt, output = (1, 2, 2, 9), (2, 3, 3, 11)
    one.see_prompt(prompt)
    one.advance(output[:2])
    one.advance(output[2:])
    ancestors = [(), (7,), (7, 7), (3,)]
    rows = logits(4, rows=len(ancestors))
    before = rows.clone()
    edited = one.edit(rows, ancestors)
    for row, source, drafted in zip(edited, before, ancestors, strict=True):
        expected = penalised_by_hand(source.tolist(), prompt, (*output, *drafted), one.params)
        torch.testing.assert_close(row, torch.tensor(expected))
    assert torch.equal(rows, before), "the logits belong to the forward pass"


def test_a_repeated_edit_is_the_same() -> None:
    """Ancestors in a draft leave no trace."""
    one = sampler(repetition_penalty=1.5, frequency_penalty=1.0)
    rows = logits(5)
    first = one.edit(rows, [()])
    one.edit(rows, [(4, 5, 6)])
    assert torch.equal(one.edit(rows, [()]), first)


def test_min_tokens() -> None:
    """No stop until enough tokens are out; a row knows how many its ancestors add."""
    one = sampler(min_tokens=5, stop_ids=(4, 6), eos_ids=(9,))
    one.advance([1, 2])
    edited = one.edit(logits(6, rows=4), [(), (1,), (1, 1), (1, 1, 1)])
    masked = [sorted((row == -torch.inf).nonzero()[:, 0].tolist()) for row in edited]
    assert masked == [[4, 6, 9], [4, 6, 9], [4, 6, 9], []]


def test_nothing_to_edit_is_no_work() -> None:
    rows = logits(7)
    assert sampler(temperature=0.5, top_k=3).edit(rows, [()]) is rows


# ── noise ──


def test_noise_keys_are_distinct() -> None:
    """Over seeds, positions, streams and samples; and a seed of 64 bits is used to its last."""
    seeds = [0, 1, 2, 2**32, 2**63, 2**64 - 1, *(sample_seed(7, i) for i in range(8))]
    positions = np.arange(500)
    keys = np.concatenate([noise_keys(seed, positions, stream) for seed in seeds for stream in Stream])
    assert len({tuple(key) for key in keys.tolist()}) == len(seeds) * len(Stream) * len(positions)
    assert keys.min() >= 0
    assert keys.max() < 2**32


def test_noise_depends_on_nothing_else() -> None:
    together = noise_keys(3, np.arange(10), Stream.TOKEN)
    for position in range(10):
        assert np.array_equal(noise_keys(3, np.array([position]), Stream.TOKEN)[0], together[position])


def test_sample_seeds() -> None:
    seeds = [sample_seed(5, i) for i in range(128)]
    assert seeds[0] == 5
    assert len(set(seeds)) == 128
    position_bits = noise_keys(5, np.arange(128), Stream.TOKEN)
    assert not set(seeds) & {int(high) << 32 | int(low) for high, low in position_bits.tolist()}


def test_uniforms() -> None:
    drawn = uniforms(11, np.arange(40_000), Stream.ACCEPT)
    assert drawn.dtype == torch.float64
    assert 0 < float(drawn.min()) < float(drawn.max()) < 1
    counts = torch.histc(drawn.float(), bins=50, min=0, max=1)
    assert p_value(counts, torch.full((50,), 800.0)) > 1e-3


@pytest.mark.parametrize("params", [{}, {"temperature": 0.5}, {"temperature": 2.0, "top_k": 7}, {"top_p": 0.5}])
def test_draws_are_the_argmax_of_shaped_logits_and_noise(params: dict[str, Any]) -> None:
    one, rows, positions = sampler(seed=99, **params), logits(8, rows=20), np.arange(100, 120)
    drawn = one.draw(rows, positions, pick)
    noise = gumbel_noise(torch.from_numpy(noise_keys(99, positions, Stream.TOKEN)), VOCAB)
    assert torch.equal(drawn, (one.shape(rows) + noise).argmax(-1))


@pytest.mark.parametrize("params", [{}, {"temperature": 1.5, "top_k": 9}, {"top_p": 0.7}])
def test_draws_have_the_distribution(params: dict[str, Any]) -> None:
    count = 8000
    one, row = sampler(seed=3, **params), logits(9)
    drawn = one.draw(row.expand(count, -1), np.arange(count), pick)
    assert p_value(torch.bincount(drawn, minlength=VOCAB), one.probs(row)[0] * count) > 1e-3


def test_greedy_takes_the_first_of_the_best() -> None:
    one = sampler(temperature=0, vocab=4)
    row = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    assert one.draw(row, np.array([5]), pick).tolist() == [1]
    assert one.probs(row).tolist() == [[0.0, 1.0, 0.0, 0.0]]
    assert one.is_argmax
    assert not sampler(temperature=0, logit_bias={1: 1.0}).is_argmax


def test_a_temperature_near_nothing_is_greedy() -> None:
    rows = logits(10, rows=50)
    assert torch.equal(sampler(temperature=1e-6).draw(rows, np.arange(50), pick), rows.argmax(-1))


def test_sample_serves_each_its_own() -> None:
    rows = logits(11, rows=6)
    greedy, biased, warm = sampler(temperature=0), sampler(temperature=0, logit_bias={2: 99.0}), sampler(seed=8)
    groups = [
        RowGroup(greedy, slice(0, 2), np.array([0, 1]), [(), ()]),
        RowGroup(biased, slice(2, 3), np.array([0]), [()]),
        RowGroup(warm, slice(3, 6), np.array([4, 5, 6]), [(), (1,), (1, 2)]),
    ]
    tokens = sample(rows, rows.argmax(-1).int(), groups, pick)
    assert tokens[:2].tolist() == rows[:2].argmax(-1).tolist()
    assert tokens[2] == 2
    assert torch.equal(tokens[3:], warm.draw(rows[3:], np.array([4, 5, 6]), pick))
    assert tokens.dtype == torch.int64


# ── log-probabilities ──


@pytest.mark.parametrize("top", [0, 1, 4, VOCAB, 100])
def test_logprobs(top: int) -> None:
    rows, tokens = logits(12, rows=3), [0, 17, 29]
    for row, token, said in zip(rows, tokens, logprobs_of(rows, tokens, top), strict=True):
        expected = row.double().log_softmax(-1)
        order = sorted(range(VOCAB), key=lambda each: -float(expected[each]))
        assert said.token == token
        assert said.logprob == pytest.approx(float(expected[token]), abs=1e-5)
        assert said.rank == order.index(token)
        assert [each for each, _ in said.top] == order[:top]
        assert [score for _, score in said.top] == pytest.approx(
            [float(expected[each]) for each in order[:top]], abs=1e-5
        )


def test_a_bare_copy_has_no_state_of_the_host() -> None:
    sampler = Sampler(
        SamplingParams(presence_penalty=0.5, logit_bias={3: 1.0}, repetition_penalty=1.2),
        seed=3,
        vocab_size=9,
        eos_ids=(1,),
    )
    sampler.see_prompt([2])
    sampler.advance([4, 5])
    bare = sampler.bare()
    sampler.advance([6])
    assert (bare.params, bare.seed, bare.stops, bare.output_tokens) == (sampler.params, 3, [1], 2)
    assert bare.additive is sampler.additive
    assert len(pickle.dumps(bare)) < len(pickle.dumps(sampler))
