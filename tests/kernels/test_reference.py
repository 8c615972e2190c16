"""The oracle against the definition: attention by one softmax over an explicit list of slots for each row."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paceline.errors import OutOfMemory
from paceline.kernels.base import PAGE_SIZE, Batch
from paceline.kernels.quant import Quantised
from paceline.kernels.reference import ReferenceBackend, ReferenceKV, embed, rms_norm, rope

HEADS, KV_HEADS, HEAD_DIM, LAYERS, PAGES = 4, 2, 8, 2, 12


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def filled(**options: object) -> ReferenceKV:
    kv = ReferenceKV(layers=LAYERS, num_pages=PAGES, kv_heads=KV_HEADS, head_dim=HEAD_DIM, **options)
    generator = torch.Generator().manual_seed(3)
    kv.keys.copy_(torch.randn(kv.keys.shape, generator=generator))
    kv.values.copy_(torch.randn(kv.values.shape, generator=generator))
    return kv


def mixed_batch(*, tree: bool) -> Batch:
    """A prefill of 3 from position 0, a decode at 37, and a draft of 4 after position 20 (a tree: 21 → 22, 22', 23').

    positions  0 1 2 │ 37 │ 20 21 22 22 23
    """
    tables = [[4, 99, 99], [0, 7, 2], [9, 3, 99]]
    slots = [64, 65, 66, 2 * 16 + 5, *range(3 * 16 + 4, 3 * 16 + 9)]
    tails = torch.full((9, 3), -7, dtype=torch.int32)  # unused entries must not matter
    tails[5, :1] = ints(53)
    tails[6, :2] = ints(53, 54)
    tails[7, :2] = ints(53, 55)
    tails[8, :3] = ints(53, 55, 56)
    return Batch(
        tokens=torch.zeros(9, dtype=torch.int32),
        positions=ints(0, 1, 2, 37, 20, 21, 22, 22, 23) if tree else ints(0, 1, 2, 37, 20, 21, 22, 23, 24),
        slots=torch.tensor(slots, dtype=torch.int32),
        row_starts=ints(0, 3, 4, 9),
        bases=ints(3, 38, 21) if tree else ints(3, 38, 25),
        page_table=torch.tensor(tables, dtype=torch.int32),
        logit_rows=ints(),
        tails=tails if tree else None,
    )


def slots_seen(batch: Batch, row: int) -> list[int]:
    sequence = int((batch.row_starts[1:] <= row).sum())
    position, base = int(batch.positions[row]), int(batch.bases[sequence])
    shared = position + 1 if batch.tails is None else min(base, position + 1)
    pages = batch.page_table[sequence].tolist()
    slots = [pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in range(shared)]
    return slots + ([] if batch.tails is None else batch.tails[row, : max(0, position - base + 1)].tolist())


def attend_by_definition(
    kv: ReferenceKV, layer: int, batch: Batch, queries: Tensor, window: int, scale: float
) -> Tensor:
    out = torch.empty_like(queries)
    for row in range(len(queries)):
        slots = slots_seen(batch, row)[-window:] if window else slots_seen(batch, row)
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            scores = kv.keys[layer, slots, shared].float() @ queries[row, head] * scale
            out[row, head] = scores.softmax(0) @ kv.values[layer, slots, shared].float()
    return out


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("window", [0, 1, 2, 5, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_what_batch_describes(tree, window, dtype):
    kv, batch = filled(dtype=dtype), mixed_batch(tree=tree)
    backend = ReferenceBackend(kv)
    backend.begin(batch)
    queries = torch.randn(9, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(4))
    got = backend.attend(1, queries, window=window, scale=0.4)
    torch.testing.assert_close(got, attend_by_definition(kv, 1, batch, queries, window, 0.4), rtol=1e-4, atol=1e-5)


def test_a_node_of_a_tree_is_blind_to_its_siblings_even_if_they_are_nan():
    kv, batch = filled(), mixed_batch(tree=True)
    backend = ReferenceBackend(kv)
    backend.begin(batch)
    queries = torch.randn(9, HEADS, HEAD_DIM)
    before = backend.attend(0, queries, window=0, scale=1.0)
    kv.keys[0, 54], kv.values[0, 54] = float("nan"), float("nan")  # row 6
    after = backend.attend(0, queries, window=0, scale=1.0)
    others = [row for row in range(9) if row != 6]
    assert torch.equal(before[others], after[others])
    assert after[6].isnan().all()


def test_store_writes_the_slots_of_the_batch_and_no_other():
    kv, batch = filled(), mixed_batch(tree=False)
    before = kv.keys.clone()
    backend = ReferenceBackend(kv)
    backend.begin(batch)
    keys, values = torch.randn(2, 9, KV_HEADS, HEAD_DIM)
    backend.store(1, keys, values)
    assert torch.equal(kv.keys[1, batch.slots.long()], keys)
    assert torch.equal(kv.values[1, batch.slots.long()], values)
    kv.keys[1, batch.slots.long()] = before[1, batch.slots.long()]
    assert torch.equal(kv.keys, before)


def test_move_reads_all_before_it_writes_any():
    kv = filled()
    keys, values = kv.read(ints(5, 6, 7))
    kv.move([5, 6, 7], [6, 7, 5])
    moved_keys, moved_values = kv.read(ints(6, 7, 5))
    assert torch.equal(moved_keys, keys)
    assert torch.equal(moved_values, values)


def test_read_gives_float32_of_every_layer():
    keys, values = filled(dtype=torch.bfloat16).read(ints(3, 1))
    assert keys.shape == values.shape == (LAYERS, 2, KV_HEADS, HEAD_DIM)
    assert keys.dtype == values.dtype == torch.float32


def test_a_kv_memory_beyond_all_memory_is_an_error_of_its_own():
    with pytest.raises(OutOfMemory, match="fewer pages"):
        ReferenceKV(layers=1 << 10, num_pages=1 << 30, kv_heads=8, head_dim=128)


def test_rope_turns_pairs_half_a_head_apart():
    x = torch.zeros(1, 1, 4)
    x[0, 0, 1] = 1.0  # pairs with dimension 3
    angle = torch.tensor([[0.3, 0.7]])
    turned = rope(x, angle.cos(), angle.sin())
    torch.testing.assert_close(turned[0, 0], torch.tensor([0.0, math.cos(0.7), 0.0, math.sin(0.7)]))


def test_rms_norm_gives_unit_rows_times_the_weight():
    x = torch.randn(5, 16) * 30
    weight = torch.rand(16) + 0.5
    assert torch.allclose((rms_norm(x, weight, 0.0) / weight).square().mean(-1), torch.ones(5))


def test_embedding_rows_of_a_quantised_matrix():
    q = torch.arange(128, dtype=torch.uint8).view(2, 64)
    scale, minimum = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    weight = Quantised(q=q, scale=scale, minimum=minimum, bits=8)
    row = embed(ints(1), weight, torch.float32)[0]
    assert row[0] == 3 * 64 + 2
    assert row[63] == 4 * 127 + 3
