"""A draft in one call has the same nodes as a plain search over the head's own passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.kernels.base import PAGE_SIZE, Batch
from paceline.kernels.cpu.abi import BEAM
from paceline.kernels.growth_reference import Growth, branch
from paceline.kernels.noise import gumbel_noise
from paceline.runner.heads.compiled import CompiledHead
from paceline.runner.heads.protocol import Tree, TreeRequest
from paceline.runner.rounds.device_state import DeviceState
from paceline.sampling.sampler import Stream, noise_keys
from tests.kernels.tiny_forward import RUNNABLE
from tests.runner.heads.test_torch import COUNTS, FEATURES, FIRST, HEADS, TABLES, both, drawing, rows

SEEDS = (11, 2**40 + 5, 7)
PRICES = ((0.01, 0.01, 0.01, 0.04), (0.0, 0.0, 0.05, 0.0, 0.0), (0.02,))


@dataclass
class Node:
    belief: float
    token: int
    parent: int
    depth: int
    row: int = -1
    tail: list[int] = field(default_factory=list)


@pytest.mark.unwatched
@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_draft_is_the_one_of_a_search_pass_by_pass(variant: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CPU_VARIANT", variant)
    for name, head in HEADS.items():
        fast, _ = both(head)
        for inverse_temperatures, wanted in (
            ((0.0, 0.0, 0.0), [TreeRequest(4, 0.0, 0.0), TreeRequest(1, 0.0, 0.0), TreeRequest(9, 0.0, 0.0)]),
            ((0.0, 1.2, 0.7), [TreeRequest(3, 0.01, 0.03), TreeRequest(6, 0.0, 0.0), TreeRequest(9, 0.02, 0.06)]),
            ((1.0, 0.0, 0.0), [TreeRequest(6, 0.0, 0.0), TreeRequest(6, 0.3, 0.9), TreeRequest(2, 0.0, 0.0)]),
            ((0.0, 0.0, 1.0), [TreeRequest(9, 0.0, 0.0, row_prices=prices) for prices in PRICES]),
            ((0.0, 1.0, 0.0), [TreeRequest(9, 0.005, 0.01, row_prices=prices) for prices in PRICES]),
        ):
            found = fast.draft(drawing(SEEDS, *inverse_temperatures), FEATURES, wanted, width=width)
            for tree, expected in zip(found, by_passes(fast, wanted, inverse_temperatures, width=width), strict=True):
                assert tree[:3] == expected[:3], name
                assert tree.confidence == pytest.approx(expected.confidence, rel=1e-4), name
            for (tokens, parents, *_), each in zip(found, wanted, strict=True):
                assert 1 <= len(tokens) <= each.limit
                assert all(-1 <= parent < i for i, parent in enumerate(parents))
                assert len(set(zip(parents, tokens, strict=True))) == len(tokens)
                assert max(map(parents.count, parents)) <= width


def test_a_wide_draft_branches_and_a_narrow_one_does_not() -> None:
    fast, _ = both(HEADS["plain"])
    wanted = [TreeRequest(12, 0.0, 0.0)] * 3
    for width, branches in ((1, False), (4, True)):
        for tokens, parents, *_ in fast.draft(drawing(SEEDS, 0.0), FEATURES, wanted, width=width):
            assert len(tokens) == 12
            assert (parents != [*range(-1, 11)]) == branches


def test_a_higher_confidence_floor_leaves_nodes_out() -> None:
    fast, _ = both(HEADS["plain"])
    sizes = []
    for worth in (0.0, 0.01, 0.05, 2.0):
        drafts = fast.draft(drawing(SEEDS, 0.0), FEATURES, [TreeRequest(12, worth, worth)] * 3, width=4)
        sizes.append([len(draft.tokens) for draft in drafts])
    assert sizes[0] == [12] * 3
    assert sizes[-1] == [1] * 3  # one token at least: an empty draft teaches nothing
    assert all(a >= b for one, other in pairwise(sizes) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("variant", RUNNABLE)
def test_a_head_that_excludes_all_tokens_but_one_drafts_that_one_first(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have a confidence of 0, and any other node is infinitely more likely than they are."""
    monkeypatch.setenv("PACELINE_CPU_VARIANT", variant)
    head = HEADS["plain"]
    sure = replace(head, weights={**head.weights, "head": 1e5 * cast(Tensor, head.weights["head"])})
    fast, _ = both(sure)
    found = fast.draft(drawing(SEEDS, 0.0), FEATURES, [TreeRequest(12, 0.0, 0.0)] * 3, width=4)
    for tree in found:
        assert 1 <= len(tree.tokens) <= 12
        assert tree.parents[0] == -1
        assert tree.confidence[0] == max(tree.confidence)


def by_passes(
    head: CompiledHead, wanted: Sequence[TreeRequest], inverse_temperatures: Sequence[float], *, width: int
) -> list[Tree]:
    trees: list[list[Node]] = [[] for _ in wanted]
    passes = [1] * len(wanted)
    last, read = [3, 4, 21], [0] * len(wanted)
    rows_of = [(s, -1) for s in range(len(wanted))]
    output = head(FIRST, features=FEATURES)
    while rows_of:
        fresh = [len(tree) for tree in trees]
        for row, (s, at) in enumerate(rows_of):
            depth = 0 if at < 0 else trees[s][at].depth
            noise = noise_of(head, s, COUNTS[s] + 1 + depth) if inverse_temperatures[s] else None
            add(trees[s], at, wanted[s], *guesses(head, output.logits[row], inverse_temperatures[s], noise, width))
        rows_of = [(s, at) for s in range(len(wanted)) for at in choose(trees[s], fresh[s], wanted[s], read[s])]
        for s in {s for s, _ in rows_of}:
            passes[s] += 1
        if rows_of:
            carry = [last[s] if trees[s][at].parent < 0 else trees[s][trees[s][at].parent].row for s, at in rows_of]
            output = head(level(trees, rows_of, read), carry=carry)
    return [best(tree, each, taken) for tree, each, taken in zip(trees, wanted, passes, strict=True)]


def noise_of(head: Any, s: int, position: int) -> Tensor:
    keys = torch.from_numpy(noise_keys(SEEDS[s], np.array([position]), Stream.TOKEN))
    return gumbel_noise(keys, 97)[0][head.ids.long()]


def guesses(
    head: Any, logits: Tensor, inverse_temperature: float, noise: Tensor | None, width: int
) -> tuple[list[int], list[float]]:
    """Tokens that may follow, the best first, and how likely the target accepts each (candidates.c)."""
    scores = logits if noise is None else logits * inverse_temperature + noise
    top = torch.topk(scores, max(width, 2))
    unit = max(inverse_temperature, 1.0)
    ahead = min(float(top.values[0] - top.values[1]) / unit, 6.0)
    tokens = [int(head.ids[place]) for place in top.indices]
    chances = []
    for rank, (place, score) in enumerate(zip(top.indices, top.values, strict=True)):
        q, behind = float(logits.softmax(0)[place]), float(top.values[0] - score) / unit
        if noise is None:
            odds = q / (1 - q) if q < 1 else math.inf
            chances.append(q if rank else squash(0.8 * math.log(odds) + 0.2))
        else:
            others = 1.06 * math.sqrt(q) - 0.56 * behind - 0.24 * rank - 1.31
            chances.append(squash(others if rank else 0.83 * math.sqrt(q) + 0.74 * ahead - 1.25))
    return tokens[:width], chances[:width]


@pytest.mark.parametrize("inverse_temperature", [0.0, 0.8, 1.0, 2.5])
def test_a_device_has_the_same_chances(inverse_temperature: float) -> None:
    """One fit, three implementations: candidates.c, growth_reference.py and its kernel, which is tested against it."""
    ids = torch.randperm(97, generator=torch.Generator().manual_seed(1))[:60].sort().values.int()
    logits = 3 * torch.randn((len(SEEDS), 60), generator=torch.Generator().manual_seed(2))
    logits[0, 5] = 40.0  # a token that is certain
    state = DeviceState(lanes=3, width=40, scratch_page=9, device="cpu", max_draft=4)
    state.lengths[:3] = torch.tensor([5, 9, 30])
    state.seed[:3] = torch.tensor(SEEDS)
    state.inverse_temperature[:3] = inverse_temperature
    growth = Growth.empty(seats=3, width=3, levels=1, device="cpu")
    branch(logits, state, growth, seats=torch.arange(3, dtype=torch.int32), level=0, ids=ids)
    for s, row in enumerate(logits):
        head = SimpleNamespace(ids=ids)
        noise = noise_of(head, s, int(state.lengths[s])) if inverse_temperature else None
        tokens, chances = guesses(head, row, inverse_temperature, noise, 3)
        assert growth.top_tokens[s].tolist() == tokens
        assert growth.top_chances[s].tolist() == pytest.approx(chances, abs=1e-6)


def squash(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def add(tree: list[Node], at: int, wanted: TreeRequest, tokens: list[int], chances: list[float]) -> None:
    above, depth = (1.0, 0) if at < 0 else (tree[at].belief, tree[at].depth)
    for token, chance in zip(tokens, chances, strict=True):
        belief = above * chance
        better = sum(node.belief >= belief for node in tree)
        if not tree or (belief >= wanted.min_confidence and better < wanted.limit):
            tree.append(Node(belief, token, at, depth + 1))


def choose(tree: list[Node], fresh: int, wanted: TreeRequest, read: int) -> list[int]:
    chosen: list[int] = []
    gain = 0.0
    for at in sorted(range(fresh, len(tree)), key=lambda i: (-tree[i].belief, i)):
        better = [i for i in range(len(tree)) if (tree[i].belief, -i) > (tree[at].belief, -at)]
        ahead = [int(math.log(tree[i].belief / tree[at].belief) / -math.log(0.7)) for i in better if i >= fresh]
        if len(chosen) == min(BEAM, wanted.limit - 1 - read) or len(better) + sum(ahead) + 1 >= wanted.limit:
            break
        chosen.append(at)
        gain += max(0.7 * tree[at].belief - price(wanted, len(better) + sum(ahead) + 1), 0.0)
    return chosen if gain >= wanted.level_price else []


def price(wanted: TreeRequest, row: int) -> float:
    return (*wanted.row_prices, *wanted.row_prices[-1:] * 40, *[0.0] * 40)[row]


def level(trees: list[list[Node]], rows_of: list[tuple[int, int]], read: list[int]) -> Batch:
    """A batch with one row for each node of a level."""
    going = list(dict.fromkeys(s for s, _ in rows_of))
    counts = [sum(s == each for each, _ in rows_of) for s in going]
    plain = rows([COUNTS[s] for s in going], counts, [trees[s][at].token for s, at in rows_of], going)
    tails = torch.zeros((len(rows_of), 16), dtype=torch.int32)
    for row, (s, at) in enumerate(rows_of):
        node, place = trees[s][at], COUNTS[s] + read[s]
        read[s] += 1
        above = trees[s][node.parent].tail if node.parent >= 0 else []
        node.row, node.tail = row, [*above, TABLES[s][place // PAGE_SIZE] * PAGE_SIZE + place % PAGE_SIZE]
        tails[row, : node.depth] = torch.tensor(node.tail)
        plain.positions[row] = COUNTS[s] + node.depth - 1
        plain.slots[row] = node.tail[-1]
    ints = torch.arange(len(rows_of), dtype=torch.int32)
    bases = torch.tensor([COUNTS[s] for s in going], dtype=torch.int32)
    return Batch(
        tokens=plain.tokens,
        positions=plain.positions,
        slots=plain.slots,
        row_starts=plain.row_starts,
        bases=bases,
        page_table=plain.page_table,
        logit_rows=ints,
        tails=tails,
    )


def best(tree: list[Node], wanted: TreeRequest, passes: int) -> Tree:
    order = sorted(range(len(tree)), key=lambda i: (-tree[i].belief, i))[: wanted.limit]
    gains = list(accumulate(tree[at].belief - price(wanted, row) for row, at in enumerate(order)))
    order = order[: max(range(len(order)), key=lambda i: (gains[i], i)) + 1]
    places = {-1: -1} | {at: place for place, at in enumerate(order)}
    beliefs = [tree[at].belief for at in order]
    return Tree([tree[at].token for at in order], [places[tree[at].parent] for at in order], passes, beliefs)
