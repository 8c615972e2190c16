"""Sampling in C gives the same bits as sampling in torch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.accept.coupled import accept_coupled
from paceline.draft import Draft
from paceline.kernels import noise
from paceline.kernels.cpu.build import load_library
from paceline.kernels.cpu.pick import pick
from paceline.runner.batch import Share, build_batch
from paceline.runner.lanes import Lanes
from paceline.sampling.sampler import Stream, noise_keys
from tests.kernels.tiny_forward import PLAIN, RUNNABLE, compiled

KEYS = torch.randint(0, 2**32, (9, 2), generator=torch.Generator().manual_seed(1))
KEYS[0] = torch.tensor([0, 0])
KEYS[1] = torch.tensor([2**32 - 1, 2**32 - 1])


@pytest.fixture(params=RUNNABLE)
def library(request, monkeypatch):
    monkeypatch.setenv("PACELINE_CPU_VARIANT", request.param)
    return load_library()


@pytest.mark.parametrize("vocab", [1, 15, 16, 49152, 50001])
def test_noise_is_the_same_bits(library, vocab):
    got = torch.empty(len(KEYS), vocab)
    for row, (first, second) in enumerate(KEYS.tolist()):
        library.paceline_gumbel(first, second, vocab, got[row].data_ptr())
    assert torch.equal(got, noise.gumbel_noise(KEYS, vocab))


@pytest.mark.parametrize(("rows", "vocab", "threads"), [(1, 49152, 2), (9, 5000, 2), (3, 17, 1), (2, 1, 3)])
def test_tokens_are_the_same(library, rows, vocab, threads):
    logits = torch.randn(rows + 2, vocab, generator=torch.Generator().manual_seed(vocab))[1:-1] * 3
    scales = torch.linspace(0.2, 3.0, rows)
    got = pick(library, threads, logits, scales, KEYS[:rows])
    assert got.dtype == torch.int64
    assert torch.equal(got, noise.pick(logits, scales, KEYS[:rows]))


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 5.0, 20.0])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e5, 1e9])
def test_skipping_hopeless_tokens_changes_no_token(library, spread, scale):
    """Logits flat and peaked, temperatures where rounding decides, and logits in steps, so that there are ties."""
    random = torch.Generator().manual_seed(7)
    logits = (torch.randn(9, 6000, generator=random) * spread * 4).round() / 4
    logits[3, ::2] = -torch.inf
    logits[4, 17] = torch.nan
    logits[5, 100] = torch.inf
    scales = torch.full((9,), scale)
    assert torch.equal(pick(library, 2, logits, scales, KEYS), by_noise(logits, scales))


def by_noise(logits: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    noisy = logits * scales[:, None] + noise.gumbel_noise(KEYS, logits.shape[1])
    return noisy.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).argmax(-1)


def test_rows_need_not_be_adjacent_and_tokens_may_be_forbidden(library):
    logits = torch.full((4, 20000), -torch.inf)
    logits[::2, 12345] = -3.0
    logits[::2, 17] = torch.nan
    assert pick(library, 2, logits[::2], torch.ones(2), KEYS[:2]).tolist() == [12345, 12345]


@pytest.mark.parametrize("vocab", [90, 9000])
def test_a_pass_draws_as_sampling_does(library, vocab):
    """Chunks, plain rows, a chain and a tree of several sequences; high and low temperatures, greedy, large seeds."""
    forward = compiled(replace(PLAIN, vocab_size=vocab), num_pages=25)
    lanes = Lanes(count=5, max_context=60, max_draft=4)
    lanes.tokens_np[:] = torch.randint(0, 90, lanes.tokens_np.shape, generator=torch.Generator().manual_seed(3)).numpy()
    lanes.pages_np[:] = torch.randperm(25).view(5, 5).numpy()
    tree = Draft(tokens=(1, 2, 3, 4), parents=(-1, -1, 1, 0))
    shares = [
        Share(lane=3, start=0, count=9, outs=2, seed=5, inverse_temperature=1.0),
        Share(lane=0, start=0, count=7, outs=0, seed=6, inverse_temperature=1.0),
        Share(lane=1, start=0, count=1, draft=Draft(tokens=(7, 8)), seed=2**64 - 1, inverse_temperature=0.5),
        Share(lane=4, start=0, count=3, draft=tree, seed=8),
        Share(lane=2, start=0, count=20, draft=tree, seed=2**63, inverse_temperature=1e-6),
    ]
    output = forward(build_batch(lanes, shares))
    got = [*output.drawn]
    assert got[1:2] == drawn(output.logits[1:2], shares[0], [9])
    assert got[2:3] == drawn(output.logits[2:3], shares[2], [1])
    assert got[5:10] == output.argmax[5:10].tolist()
    assert got[10:11] == drawn(output.logits[10:11], shares[4], [20])
    assert got != output.argmax.tolist()
    every = forward(replace(build_batch(lanes, shares), roots=None))  # without roots every row is drawn
    assert [*every.drawn] == [
        *drawn(every.logits[:2], shares[0], [8, 9]),
        *drawn(every.logits[2:5], shares[2], [1, 2, 3]),
        *every.argmax[5:10].tolist(),
        *drawn(every.logits[10:], shares[4], [20, 21, 21, 22, 22]),
    ]


def test_more_is_drawn_after_drafts_that_were_drawn(library):
    """Two sequences whose trees grow: by the drawn token, by other tokens beside it, before and after it, and by the
    drawn token in wrong places."""
    forward = compiled(replace(PLAIN, vocab_size=900), num_pages=14)
    lanes = Lanes(count=2, max_context=60, max_draft=40)
    lanes.tokens_np[:] = torch.randint(0, 90, lanes.tokens_np.shape, generator=torch.Generator().manual_seed(3)).numpy()
    lanes.pages_np[:] = torch.randperm(14).view(2, 7).numpy()
    starts, lengths = (3, 15), [0, 0]
    trees: list[list[tuple[int, int]]] = [[(5, -1)], [(6, -1), (7, 0)]]  # token, parent
    for turn in range(6):
        drafts = [Draft(tuple(t for t, _ in tree), tuple(p for _, p in tree)) for tree in trees]
        shares = [
            Share(lane, starts[lane], 2, draft=draft, seed=40 + lane, inverse_temperature=1.0)
            for lane, draft in enumerate(drafts)
        ]
        for lane, draft in enumerate(drafts):
            lanes.write(lane, starts[lane] + 2, draft.tokens)
        output = forward(build_batch(lanes, shares))
        got, first = [*output.drawn], 0
        for lane, draft in enumerate(drafts):
            positions = [starts[lane] + 2]
            for parent in draft.parents:
                positions.append(positions[parent + 1] + 1)
            rows = slice(first, first + 1 + len(draft))
            wanted = drawn(output.logits[rows], shares[lane], positions)
            verdict = accept_coupled(draft, wanted)
            assert accept_coupled(draft, got[rows]) == verdict, (turn, lane)
            lengths[lane] = len(verdict.path)
            at = verdict.path[-1] if verdict.path else -1
            wrong = [(verdict.token, parent) for parent in (-1, 0) if parent != at]
            beside = [(token, at) for token in (1, verdict.token, 2)]
            grown = [*wrong, *beside[:: 1 if turn % 2 else -1]]
            trees[lane] += [node for node in grown if node not in trees[lane]]
            first = rows.stop
    assert lengths == [5, 5]


def drawn(logits: torch.Tensor, share: Share, positions: list[int]) -> list[int]:
    keys = torch.from_numpy(noise_keys(share.seed, np.array(positions), Stream.TOKEN))
    return noise.pick(logits, torch.full((len(logits),), share.inverse_temperature), keys).tolist()


def test_nothing_to_pick(library):
    assert pick(library, 2, torch.empty(0, 100), torch.empty(0), KEYS[:0]).tolist() == []
