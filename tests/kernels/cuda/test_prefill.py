"""Attention of prompts: its plan in the interpreter, and its bits on a GPU against those of `Attention`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from paceline.kernels.base import PAGE_SIZE
from paceline.kernels.cuda import prefill, prefill_plan
from paceline.kernels.cuda.attend import Attention
from paceline.kernels.cuda.kv import CudaKV
from tests.kernels.cuda.conftest import ON_GPU

CONTEXT = 2048
WORKS = ((0, 700), (1001, 130), (3, 65), (1300, 300), (40, 1))  # first position and rows of each seat
on_gpu = pytest.mark.skipif(not ON_GPU, reason="written in Gluon, which the interpreter cannot run")


class Prompts:
    """Sequences in a KV memory full of noise, each in a lane of another number, and queries for their rows."""

    def __init__(self, shape: tuple[int, int, int], device: torch.device, works: Sequence[tuple[int, int]] = WORKS):
        heads, kv_heads, head_dim = shape
        generator = torch.Generator().manual_seed(sum(shape))
        pages, kind = CONTEXT // PAGE_SIZE, torch.bfloat16 if ON_GPU else torch.float32
        count = len(works) * pages
        self.kv = CudaKV(layers=2, num_pages=count, kv_heads=kv_heads, head_dim=head_dim, dtype=kind, device=device)
        for memory in (self.kv.keys, self.kv.values):
            memory.copy_(torch.randn(memory.shape, generator=generator))
        self.table = torch.randperm(count, generator=generator).int().view(len(works), pages).to(device)
        self.lanes = torch.arange(len(works) - 1, -1, -1, dtype=torch.int32, device=device)
        self.works = works
        rows = sum(count for _, count in works)
        self.queries = torch.randn((rows, heads, head_dim), generator=generator).to(device, kind)

    def attend(self, works: Sequence[tuple[int, int]], queries: Tensor, window: int) -> Tensor:
        device = queries.device
        counts = torch.tensor([0, *(count for _, count in works)])
        return Attention(device=device)(
            queries,
            self.kv,
            1,
            row_starts=counts.cumsum(0).int().to(device),
            positions=torch.cat([torch.arange(first, first + count) for first, count in works]).int().to(device),
            page_table=self.table,
            lanes=self.lanes,
            out=torch.full_like(queries, torch.nan),
            seats=len(works),
            max_rows=max(count for _, count in works),
            max_context=CONTEXT,
            scale=0.1,
            window=window,
        )

    def slots(self, seat: int, positions: range) -> Tensor:
        pages = self.table[self.lanes[seat].item()].cpu()
        return torch.tensor([int(pages[p // PAGE_SIZE]) * PAGE_SIZE + p % PAGE_SIZE for p in positions])


@on_gpu
@pytest.mark.parametrize("window", [0, 600, 33])
@pytest.mark.parametrize(
    "shape", [(8, 2, 128), (4, 4, 64), (6, 2, 128), (14, 2, 64), (32, 1, 128)], ids=lambda x: "x".join(map(str, x))
)
def test_prompts_have_the_bits_of_a_few_rows_at_a_time(shape, window, device):
    """A pass over all rows goes to the kernel for prompts, passes over at most 64 rows do not."""
    prompts = Prompts(shape, device)
    assert prefill.fits(prompts.queries, prompts.kv, group=shape[0] // shape[1], tile=128, tiles=2, max_rows=700)
    at_once = prompts.attend(WORKS, prompts.queries, window)
    ends = [0, *torch.tensor([count for _, count in WORKS]).cumsum(0).tolist()]
    for done in range(0, 700, 50):
        part = [(first + done, min(50, count - done)) if done < count else (first, 1) for first, count in WORKS]
        rows = [start + (done if done < count else 0) for start, (_, count) in zip(ends, WORKS, strict=False)]
        index = torch.cat([torch.arange(row, row + count) for row, (_, count) in zip(rows, part, strict=True)]).to(
            device
        )
        few = prompts.attend(part, prompts.queries[index].contiguous(), window)
        assert torch.equal(few, at_once[index])


@on_gpu
def test_prompts_see_nothing_past_their_ends(device):
    """Slots and pages past the end of a sequence may hold anything, and entries of the page table, too."""
    prompts = Prompts((8, 2, 128), device)
    wanted = prompts.attend(WORKS, prompts.queries, 0)
    for seat, (first, count) in enumerate(WORKS):
        beyond = prompts.slots(seat, range(first + count, CONTEXT)).to(device)
        nothing = torch.full((len(beyond), 2, 128), torch.nan, device=device)
        prompts.kv.store(1, beyond, nothing, nothing)
        prompts.table[prompts.lanes[seat].item(), -(-(first + count) // PAGE_SIZE) :] = 1 << 27
    assert torch.equal(prompts.attend(WORKS, prompts.queries, 0), wanted)


def test_the_plan_of_blocks_and_clean_ends_of_pages(device):
    works = ((0, 5), (0, 0), (40, 17), (16, 16))
    prompts = Prompts((8, 2, 16), device, works)
    ends = [0, *torch.tensor([count for _, count in works]).cumsum(0).tolist()]
    positions = torch.cat([torch.arange(first, first + count) for first, count in works]).int().to(device)
    before = prompts.kv.values.clone()
    plan = torch.full((20, 4), -1, dtype=torch.int32, device=device)
    prefill_plan.list_blocks[(4, 2)](
        torch.tensor(ends, dtype=torch.int32, device=device), positions, prompts.table, prompts.lanes,
        prompts.kv.values[1], plan, prompts.table.shape[1], 4,
        EACH=8, KV_HEADS=2, HEAD_DIM=16, PAGE=PAGE_SIZE, LANES=True, SEATS=8, LISTED=2,
    )  # fmt: skip  # a name a line would hide the order
    assert plan[0, 0] == 6
    blocks = [[21, 1, 1, 56], [13, 8, 1, 48], [30, 8, 0, 24], [0, 5, 3, 0], [5, 8, 1, 40], [22, 8, 0, 16]]
    assert plan[1:7].tolist() == blocks
    assert (plan[7:] == -1).all()
    slots = torch.cat([prompts.slots(0, range(5, 16)), prompts.slots(2, range(57, 64))]).to(device)
    before[1][slots // PAGE_SIZE, :, slots % PAGE_SIZE] = 0.0
    assert torch.equal(prompts.kv.values, before)
