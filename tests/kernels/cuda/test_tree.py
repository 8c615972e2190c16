"""Layout, acceptance and moves of trees on a device against the reference, over random trees."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from paceline.draft import Draft
from paceline.kernels import tree_reference
from paceline.kernels.base import PAGE_SIZE
from paceline.kernels.cuda import tree
from paceline.kernels.cuda.kv import CudaKV
from paceline.kernels.quant import FP8
from paceline.runner.rounds.device_state import DeviceState
from paceline.runner.rounds.protocol import read_landed
from tests.kernels.cuda.conftest import ON_GPU
from tests.kernels.cuda.test_rounds import random_seats, same_state

WIDTH = 60


def random_trees(random: torch.Generator, device: torch.device, *, lanes: int, most: int) -> DeviceState:
    """Trees of two tokens, over pages that no two lanes share."""
    state = DeviceState(lanes=lanes, width=WIDTH, scratch_page=500, device=device, max_draft=most)
    state.tokens[:-1] = torch.randint(0, 3, (lanes, WIDTH), generator=random).int().to(device)
    state.lengths[:-1] = torch.randint(1, WIDTH - most - 1, (lanes,), generator=random).int().to(device)
    pages = torch.randperm(500, generator=random)[: lanes * state.pages.shape[1]]
    state.pages[:-1] = pages.view(lanes, -1).int().to(device)
    state.seed.copy_(torch.randint(-(2**63), 2**63 - 1, (lanes + 1,), generator=random))
    for node in range(most):
        state.parents[:, node] = torch.randint(-1, max(node, 0) or 0, (lanes + 1,), generator=random) if node else -1
    return state


def tree_rows(state: DeviceState, seats: Tensor, counts: Tensor, rows: int, most: int, by: object = tree) -> dict:
    device = state.device
    out = {
        name: torch.full((rows,), -7, dtype=torch.int32, device=device)
        for name in ("tokens", "positions", "slots", "owners", "leads")
    }
    out["row_starts"] = torch.full((len(seats) + 1,), -7, dtype=torch.int32, device=device)
    out["bases"] = torch.full((len(seats),), -7, dtype=torch.int32, device=device)
    out["tails"], out["ancestors"] = torch.zeros((2, rows, most), dtype=torch.int32, device=device)
    by.tree_layout(state, seats=seats, counts=counts, **out)
    return out


@pytest.mark.parametrize(
    ("seats", "rows", "most"), [(1, 1, 1), (1, 6, 5), (5, 5, 3), (5, 17, 8), (13, 100, 7), (3, 60, 17)]
)
def test_layout(seats: int, rows: int, most: int, device: torch.device) -> None:
    random = torch.Generator().manual_seed(seats * 1000 + rows)
    state = random_trees(random, device, lanes=20, most=most)
    chosen = random_seats(random, state, seats)
    counts = torch.randint(1, most + 2, (seats,), generator=random).int().to(device)
    mine, wanted = counts.clone(), counts.clone()
    got = tree_rows(state, chosen, mine, rows, most)
    right = tree_rows(state, chosen, wanted, rows, most, tree_reference)
    assert torch.equal(mine, wanted)
    for name in got:
        assert got[name].tolist() == right[name].tolist(), name
    paths_are_those_of_drafts(state, chosen, right)


def paths_are_those_of_drafts(state: DeviceState, seats: Tensor, rows: dict[str, Tensor]) -> None:
    """Check the reference itself, against ancestors found one by one."""
    starts = rows["row_starts"].tolist()
    for seat, lane in enumerate(seats.tolist()):
        count, length = starts[seat + 1] - starts[seat] - 1, int(state.lengths[lane])
        draft = Draft(tokens=(0,) * count, parents=tuple(state.parents[lane, :count].tolist()))
        paths: list[list[int]] = []
        slots = rows["slots"][starts[seat] + 1 : starts[seat + 1]].tolist()
        for node, parent in enumerate(draft.parents):
            paths.append([*(paths[parent] if parent >= 0 else []), slots[node]])
            assert rows["positions"][starts[seat] + 1 + node] == length + len(paths[-1]) - 1
        leads = rows["leads"][starts[seat] : starts[seat + 1]].tolist()
        leaves = max(1, sum(node not in draft.parents for node in range(count)))
        assert {*leads} == {*range(starts[seat], starts[seat] + leaves)}
        for lead, path in zip(leads[1:], paths, strict=True):
            assert rows["tails"][lead, : len(path)].tolist() == path
        for node, path in enumerate(paths, starts[seat] + 1):
            said = [int(rows["tokens"][starts[seat] + 1 + slots.index(slot)]) for slot in path]
            assert rows["ancestors"][node].tolist() == [*said, *[-1] * (rows["ancestors"].shape[1] - len(path))]


@pytest.mark.unwatched
@pytest.mark.parametrize(("seats", "most"), [(1, 1), (1, 8), (9, 3), (30, 8), (12, 20)])
@pytest.mark.parametrize("synthetic", [0.0, 0.7, 1.0])
def test_accept(seats: int, most: int, synthetic: float, device: torch.device) -> None:
    random = torch.Generator().manual_seed(seats * 10 + most)
    state = random_trees(random, device, lanes=40, most=most)
    expected = copy.deepcopy(state)
    chosen = random_seats(random, state, seats)
    row_starts = torch.zeros(seats + 1, dtype=torch.int32)
    row_starts[1:] = torch.randint(1, most + 2, (seats,), generator=random).cumsum(0)
    row_starts = row_starts.to(device)
    targets = torch.randint(0, 3, (seats * (most + 1),), generator=random).int().to(device)
    out = torch.full((seats, 4 + 4 * most), -7, dtype=torch.int32, device=device)
    wanted = torch.full_like(out, -8)
    given = {"seats": chosen, "row_starts": row_starts, "targets": targets}
    tree.tree_accept(state, **given, out=out, synthetic_acceptance=synthetic, pdl=ON_GPU)
    tree_reference.tree_accept(expected, **given, out=wanted, synthetic_acceptance=synthetic)
    assert out.tolist() == wanted.tolist()
    assert same_state(state, expected)
    for row, lane, start in zip(out.tolist(), chosen.tolist(), row_starts.tolist(), strict=False):
        landed, length = read_landed(row, tree=True), int(state.lengths[lane])
        if lane == state.dummy:
            assert landed.drafted == ()
            continue
        drafted = Draft(landed.drafted, landed.parents)
        assert state.tokens[lane, length - len(landed.tokens) : length].tolist() == [*landed.tokens]
        assert [drafted.parents[node] for node in landed.path] == [-1, *landed.path][: len(landed.path)]
        assert landed.tokens[:-1] == tuple(drafted.tokens[node] for node in landed.path)
        if not synthetic:
            rows = [start, *(start + 1 + node for node in landed.path)]
            assert landed.tokens == tuple(targets[rows].tolist())
            last = landed.path[-1] if landed.path else -1
            missed = {token for token, parent in zip(drafted.tokens, drafted.parents, strict=True) if parent == last}
            assert landed.tokens[-1] not in missed


def test_verdicts_of_other_rules(device: torch.device) -> None:
    """They name the end of the path and the token after it, even one that was drafted there; others are coupled."""
    random = torch.Generator().manual_seed(6)
    seats, most = 12, 7
    state = random_trees(random, device, lanes=20, most=most)
    expected, chosen = copy.deepcopy(state), torch.arange(seats, dtype=torch.int32, device=device)
    parents = state.parents.tolist()
    counts = torch.randint(1, most + 2, (seats,), generator=random)
    row_starts = torch.cat((torch.zeros(1), counts.cumsum(0))).int().to(device)
    ends = [int(torch.randint(-1, int(count), (), generator=random)) for count in counts]
    verdicts = torch.tensor([[end, 2] for end in ends], dtype=torch.int32, device=device)
    targets = torch.randint(0, 3, (int(counts.sum()),), generator=random).int().to(device)
    given = {"seats": chosen, "row_starts": row_starts, "targets": targets, "verdicts": verdicts}
    out, wanted = (torch.full((seats, 4 + 4 * most), fill, dtype=torch.int32, device=device) for fill in (-7, -8))
    tree.tree_accept(state, **given, out=out, pdl=ON_GPU)
    tree_reference.tree_accept(expected, **given, out=wanted)
    assert out.tolist() == wanted.tolist()
    assert same_state(state, expected)
    assert {-1, 0} < {*ends}
    for row, end, above in zip(out.tolist(), ends, parents, strict=False):
        path, node = [], end - 1
        while node >= 0:
            path.insert(0, node)
            node = above[node]
        landed = read_landed(row, tree=True)
        assert end < 0 or (landed.path, landed.tokens[-1]) == (tuple(path), 2)


def test_a_chain_is_accepted_as_one(device: torch.device) -> None:
    """The coins of a benchmark too, so that a tree and a chain of its depth can be compared."""
    from paceline.kernels.cuda import rounds

    random = torch.Generator().manual_seed(3)
    for synthetic in (0.0, 0.6):
        state = random_trees(random, device, lanes=40, most=4)
        state.parents.copy_(torch.arange(-1, 3))
        other = copy.deepcopy(state)
        seats = random_seats(random, state, 30)
        targets = torch.randint(0, 3, (150,), generator=random).int().to(device)
        given = {"seats": seats, "row_starts": torch.arange(0, 151, 5).int().to(device), "targets": targets}
        out, chain = (torch.zeros((30, n), dtype=torch.int32, device=device) for n in (20, 12))
        tree.tree_accept(state, **given, out=out, synthetic_acceptance=synthetic)
        rounds.accept(other, **given, out=chain, synthetic_acceptance=synthetic)
        assert torch.equal(out[:, :12], chain)
        assert same_state(state, other)


@pytest.mark.unwatched
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_accepted_nodes_move_into_place(seed: int, dtype: torch.dtype, device: torch.device) -> None:
    random = torch.Generator().manual_seed(seed)
    most, seats = 6, 9
    state = random_trees(random, device, lanes=12, most=most)
    chosen = random_seats(random, state, seats)
    kv = CudaKV(layers=2, num_pages=500, kv_heads=2, head_dim=24, dtype=dtype, device=device)
    noise = torch.randint(0, 255, kv.keys.shape, generator=random, dtype=torch.uint8).to(device)
    for x in (kv.keys, kv.values):
        x.copy_(noise.float().to(dtype) if dtype != FP8 else (noise % 100).float().to(FP8))
    other = copy.deepcopy(kv)
    row_starts = torch.arange(0, (most + 1) * seats + 1, most + 1).int().to(device)
    out = torch.zeros((seats, 4 + 4 * most), dtype=torch.int32, device=device)
    # One token above all: long paths, which take the first child.
    state.tokens[:-1] = 1
    state.parents[:, 1:3] = -1
    state.tokens.scatter_(1, state.lengths[:, None].long(), 2)
    targets = torch.ones(len(chosen) * (most + 1), dtype=torch.int32, device=device)
    tree.tree_accept(state, seats=chosen, row_starts=row_starts, targets=targets, out=out)
    source, target = tree_reference.tree_moves(state, seats=chosen, out=out)
    moved = source != target
    assert moved.sum() > 5
    tree.tree_move(state, kv, seats=chosen, out=out, pdl=ON_GPU)
    other.move(source[moved].tolist(), target[moved].tolist())
    for got, wanted in ((kv.keys, other.keys), (kv.values, other.values)):
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
    for row, lane in zip(out.tolist(), chosen.tolist(), strict=True):
        landed = read_landed(row, tree=True)
        first = int(state.lengths[lane]) - len(landed.tokens)
        slots = [
            int(state.pages[lane, (first + i) // PAGE_SIZE]) * PAGE_SIZE + (first + i) % PAGE_SIZE for i in range(9)
        ]
        assert target[chosen.tolist().index(lane), : landed.accepted].tolist() == slots[: landed.accepted]
