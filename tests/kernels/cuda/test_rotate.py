from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.kernels.base import PAGE_SIZE
from paceline.kernels.cuda.kv import CudaKV
from paceline.kernels.cuda.rotate import rotate
from paceline.kernels.quant import FP8
from paceline.kernels.reference import rms_norm, rope

EPS, PAGES, POSITIONS = 1e-5, 6, 50
SHAPES = [(4, 2, 16), (9, 3, 8), (2, 1, 80), (8, 8, 64), (5, 1, 96), (3, 1, 256)]  # heads, kv_heads, head_dim


class Case:
    def __init__(self, shape: tuple[int, int, int], rows: int, dtype: torch.dtype, device: torch.device) -> None:
        heads, kv_heads, head_dim = self.shape = shape
        generator = torch.Generator().manual_seed(rows)
        self.qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim, generator=generator).to(device, dtype)
        self.positions = torch.randint(0, POSITIONS, (rows,), generator=generator).to(device, torch.int32)
        self.slots = torch.randperm(PAGES * PAGE_SIZE, generator=generator)[:rows].to(device, torch.int32)
        angles = torch.randn(POSITIONS, head_dim // 2, generator=generator).to(device)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.norms = (torch.rand(2, head_dim, generator=generator) + 0.5).to(device)

    def kv(self, dtype: torch.dtype) -> CudaKV:
        _, kv_heads, head_dim = self.shape
        device = self.qkv.device
        return CudaKV(layers=2, num_pages=PAGES, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, device=device)

    def run(self, kv: CudaKV, rows: slice = slice(None), *, norm: bool) -> Tensor:
        heads, _, head_dim = self.shape
        qkv = self.qkv[rows].contiguous()
        queries = torch.full((len(qkv), heads, head_dim), float("nan"), dtype=qkv.dtype, device=qkv.device)
        q_norm, k_norm = self.norms if norm else (None, None)
        rotate(
            qkv,
            queries,
            kv,
            1,
            positions=self.positions[rows],
            slots=self.slots[rows],
            cos=self.cos,
            sin=self.sin,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=EPS,
        )
        return queries

    def expected(self, *, norm: bool) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv_heads, head_dim = self.shape
        q, k, v = self.qkv.view(len(self.qkv), -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
        if norm:
            q, k = rms_norm(q, self.norms[0], EPS), rms_norm(k, self.norms[1], EPS)
        angles = self.cos[self.positions.long()], self.sin[self.positions.long()]
        return rope(q, *angles), rope(k, *angles), v


def close(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 1.6e-2
    torch.testing.assert_close(got.float(), wanted.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotation_as_the_reference_does_it(shape, norm, dtype, device):
    case = Case(shape, 5, dtype, device)
    kv = case.kv(dtype)
    queries = case.run(kv, norm=norm)
    wanted_queries, wanted_keys, wanted_values = case.expected(norm=norm)
    keys, values = kv.read(case.slots)
    close(queries, wanted_queries, dtype)
    close(keys[1], wanted_keys, dtype)
    assert torch.equal(values[1], wanted_values.float())
    assert not keys[0].any(), "another layer was written"


def test_only_the_slots_of_the_rows_are_written(dtype, device):
    case = Case((4, 2, 16), 3, dtype, device)
    kv = case.kv(dtype)
    case.run(kv, norm=True)
    others = [slot for slot in range((PAGES + 1) * PAGE_SIZE) if slot not in case.slots.tolist()]
    keys, values = kv.read(torch.tensor(others, device=device))
    assert not keys.any()
    assert not values.any()


def test_a_row_does_not_know_of_other_rows(dtype, device):
    case = Case((6, 2, 32), 7, dtype, device)
    together, alone = case.kv(dtype), case.kv(dtype)
    queries = case.run(together, norm=True)
    for row in range(7):
        assert torch.equal(case.run(alone, slice(row, row + 1), norm=True)[0], queries[row])
    assert torch.equal(alone.keys, together.keys)
    assert torch.equal(alone.values, together.values)


def test_float8_memory_saturates(device):
    case = Case((2, 1, 16), 4, torch.float32, device)
    case.qkv.copy_((case.qkv * 8).round() * 64)  # float8 has these, up to 448
    case.cos.fill_(1.0)
    case.sin.fill_(0.0)
    kv = case.kv(FP8)
    case.run(kv, norm=False)
    _, wanted_keys, wanted_values = case.expected(norm=False)
    assert wanted_keys.abs().max() > 448
    keys, values = kv.read(case.slots)
    assert torch.equal(keys[1], wanted_keys.clamp(-448, 448))
    assert torch.equal(values[1], wanted_values.clamp(-448, 448))


def test_a_row_beyond_the_tables_is_not_turned_and_reads_nothing(device):
    case = Case((2, 1, 16), 1, torch.float32, device)
    case.positions[:] = POSITIONS + 1000
    queries = case.run(case.kv(torch.float32), norm=False)
    assert torch.equal(queries.flatten(), case.qkv[0, : 2 * 16])
