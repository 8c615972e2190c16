from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.errors import OutOfMemory
from paceline.kernels.base import PAGE_SIZE
from paceline.kernels.cuda.kv import CudaKV
from paceline.kernels.kv_tensors import page_bytes
from paceline.kernels.quant import FP8

LAYERS, PAGES, KV_HEADS, HEAD_DIM = 2, 5, 3, 8
DTYPES = [torch.float32, torch.bfloat16, FP8]


def made(dtype: torch.dtype, device: torch.device) -> CudaKV:
    return CudaKV(layers=LAYERS, num_pages=PAGES, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype, device=device)


def filled(dtype: torch.dtype, device: torch.device) -> CudaKV:
    kv = made(dtype, device)
    generator = torch.Generator().manual_seed(1)
    slots = torch.arange(PAGES * PAGE_SIZE, device=device)
    for layer in range(LAYERS):
        keys, values = torch.randn((2, len(slots), KV_HEADS, HEAD_DIM), generator=generator).to(device)
        kv.store(layer, slots, keys, values)
    return kv


def ints(device: torch.device, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("kind", DTYPES, ids=str)
def test_what_is_stored_is_read_back_rounded_once(kind, device):
    kv = made(kind, device)
    keys, values = torch.randn((2, 3, KV_HEADS, HEAD_DIM), generator=torch.Generator().manual_seed(2)).to(device)
    slots = ints(device, 3, 40, 79)
    kv.store(1, slots, keys, values)
    got_keys, got_values = kv.read(slots)
    assert got_keys.shape == (LAYERS, 3, KV_HEADS, HEAD_DIM)
    assert got_keys.dtype == got_values.dtype == torch.float32
    assert torch.equal(got_keys[1], keys.to(kind).float())
    assert torch.equal(got_values[1], values.to(kind).float())
    assert not got_keys[0].any()


@pytest.mark.parametrize("kind", DTYPES, ids=str)
def test_a_slot_is_an_offset_in_a_page_of_each_head(kind, device):
    kv = filled(kind, device)
    keys, _ = kv.read(ints(device, 2 * PAGE_SIZE + 5))
    assert torch.equal(keys[:, 0], kv.keys[:, 2, :, 5].float())


@pytest.mark.parametrize("kind", DTYPES, ids=str)
def test_move_reads_all_before_it_writes_any(kind, device):
    kv = filled(kind, device)
    everything = ints(device, *range(PAGES * PAGE_SIZE))
    keys, values = kv.read(everything)
    kv.move([5, 20, 33], [20, 33, 5])
    moved = list(range(PAGES * PAGE_SIZE))
    moved[20], moved[33], moved[5] = 5, 20, 33
    new_keys, new_values = kv.read(everything)
    assert torch.equal(new_keys, keys[:, moved])
    assert torch.equal(new_values, values[:, moved])


def test_float8_saturates(device):
    kv = made(FP8, device)
    keys = torch.full((1, KV_HEADS, HEAD_DIM), 1e6, device=device)
    kv.store(0, ints(device, 7), keys, -keys)
    got_keys, got_values = kv.read(ints(device, 7))
    assert (got_keys[0] == 448.0).all()
    assert (got_values[0] == -448.0).all()


@pytest.mark.parametrize("kind", DTYPES, ids=str)
def test_the_scratch_page_comes_after_the_pages(kind, device):
    kv = made(kind, device)
    assert kv.num_pages == kv.scratch_page == PAGES
    memory = kv.keys.nbytes + kv.values.nbytes
    assert memory == (PAGES + 1) * page_bytes(LAYERS, KV_HEADS, HEAD_DIM, kind)
    kv.store(0, ints(device, PAGES * PAGE_SIZE), *torch.ones((2, 1, KV_HEADS, HEAD_DIM), device=device))
    keys, _ = kv.read(ints(device, *range(PAGES * PAGE_SIZE)))
    assert not keys.any()


def test_a_kv_memory_beyond_all_memory_is_an_error_of_its_own(device):
    with pytest.raises(OutOfMemory, match="fewer pages"):
        CudaKV(layers=1 << 10, num_pages=1 << 30, kv_heads=8, head_dim=128, device=device)
