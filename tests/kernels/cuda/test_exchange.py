"""Sums and logits over ranks: the same bits on every rank, and those of a sum in one tree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.kernels.cuda.exchange import MUTED, Peers
from paceline.kernels.cuda.norm import norm
from paceline.runner.parallel.exchange import fold
from tests.kernels.cuda.conftest import ON_GPU
from tests.kernels.cuda.meeting_ranks import FEW_PROGRAMS, on_ranks, peers_in

ROWS, HIDDEN, COLUMNS = 2 * FEW_PROGRAMS + 1, 20, 75
TURNS = 3  # meetings of a program, so that both halves of the slots are used again


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def added(parts: Tensor, bias: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Add all parts [shards, rows, hidden] in one tree, then a norm."""
    wanted = fold([*parts]) + bias + x
    normed = torch.empty_like(x)
    norm(wanted, weight, normed, eps=1e-5)
    return wanted, normed


@pytest.mark.parametrize("shards", range(1, 9))
def test_shards_of_a_rank_that_is_alone(shards: int, device: torch.device) -> None:
    parts, bias, weight = random(shards, ROWS, HIDDEN, seed=1), random(HIDDEN, seed=2), random(HIDDEN, seed=3)
    parts, bias, weight, x = (each.to(device) for each in (parts, bias, weight, random(ROWS, HIDDEN, seed=4)))
    wanted, out, peers = added(parts, bias, x, weight), torch.empty_like(x), Peers.alone(HIDDEN, device)
    peers.add_norm(parts, bias, x, weight, out, eps=1e-5, pdl=ON_GPU)
    assert torch.equal(x, wanted[0])
    assert torch.equal(out, wanted[1])
    peers.add(parts, None, out, pdl=ON_GPU)
    assert torch.equal(out, fold([*parts]))


def meet(folder: Path, rank: int, ranks: int, shards: int) -> list[Tensor]:
    """Add and gather in turns; return all results of a rank."""
    peers, results = peers_in(folder, rank, ranks, HIDDEN), []
    for turn in range(TURNS):
        parts = random(ranks * shards, ROWS, HIDDEN, seed=turn)[rank * shards : (rank + 1) * shards].contiguous()
        x, out = random(ROWS, HIDDEN, seed=50), torch.empty(ROWS, HIDDEN)
        peers.add_norm(parts, random(HIDDEN, seed=51), x, random(HIDDEN, seed=52), out, eps=1e-5)
        logits, whole = random(2, COLUMNS, seed=turn), torch.empty(2, COLUMNS)
        own = slice(COLUMNS * rank // ranks, COLUMNS * (rank + 1) // ranks)
        peers.gather(logits[:, own].contiguous(), whole)
        results += [x, out, whole]
        peers.status[MUTED] = 1  # a rehearsal, of which the others know nothing
        peers.add(parts, None, torch.empty_like(out))
        peers.status[MUTED] = 0
    return results


@pytest.mark.skipif(ON_GPU, reason="ranks are processes of the interpreter")
@pytest.mark.parametrize(("ranks", "shards"), [(2, 1), (2, 2), (3, 1)])
def test_ranks_have_the_bits_of_one_tree(ranks: int, shards: int, tmp_path: Path) -> None:
    every = on_ranks(ranks, tmp_path, meet, shards)
    for turn in range(TURNS):
        parts = random(ranks * shards, ROWS, HIDDEN, seed=turn)
        x, out = added(parts, random(HIDDEN, seed=51), random(ROWS, HIDDEN, seed=50), random(HIDDEN, seed=52))
        for results in every:
            assert torch.equal(results[3 * turn], x)
            assert torch.equal(results[3 * turn + 1], out)
            assert torch.equal(results[3 * turn + 2], random(2, COLUMNS, seed=turn))
