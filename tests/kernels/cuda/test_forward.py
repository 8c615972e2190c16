"""The decoder of launches against the one of plain torch, for every architecture and weight format."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from paceline.kernels.base import Batch
from paceline.kernels.quant import dequantise
from paceline.models.config import ModelConfig
from paceline.runner.cuda import CudaDecoder, CudaForward, new_kv
from paceline.runner.eager import EagerForward
from tests.kernels.cuda.conftest import ON_GPU
from tests.kernels.tiny_forward import CONFIGS, FORMATS, PLAIN, random_weights, rows_of

TOKENS = [(7 * i * i + 3 * i) % 90 for i in range(170)]
PAGES = [9, 3, 4, 0, 7, 1, 11, 5, 2, 6, 8]
OTHER = [12, 14, 13, 10]


def forwards(
    config: ModelConfig, format: str, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> tuple[CudaForward, EagerForward]:
    weights = random_weights(config, format)
    floats = {name: w if isinstance(w, torch.Tensor) else dequantise(w) for name, w in weights.items()}
    oracle = EagerForward(config, floats, num_pages=15, device=device)
    decoder = CudaDecoder(config, weights, max_context=240, dtype=dtype, device=device, pdl=ON_GPU)
    assert not weights, "a weight was not packed"
    return CudaForward(decoder, new_kv(config, num_pages=15, dtype=kv_dtype or dtype, device=device)), oracle


def moved(batch: Batch, device: torch.device) -> Batch:
    names = ("tokens", "positions", "slots", "row_starts", "bases", "page_table", "logit_rows")
    return Batch(**{name: getattr(batch, name).to(device) for name in names})


def compare(config: ModelConfig, format: str, device: torch.device, dtype: torch.dtype, limit: float = 0.0) -> None:
    forward, oracle = forwards(config, format, device, dtype)
    limit = limit or (1e-4 if dtype is torch.float32 else 0.08)
    for works in (
        [(0, 50)],
        [(50, 51)],
        [(51, 56), (0, 20)],
        [(56, 58), (20, 21)],
    ):
        rows = [(TOKENS, *work, pages) for work, pages in zip(works, (PAGES, OTHER), strict=False)]
        batch = rows_of(*rows)
        got, wanted = forward(batch), oracle(moved(batch, device)).logits.cpu()
        error = (got.logits - wanted).norm() / wanted.norm()
        assert error < limit, f"{works}: {error}"
        assert torch.equal(got.argmax, got.logits.argmax(-1).int())


@pytest.mark.parametrize("config", CONFIGS)
def test_every_architecture(config: str, device: torch.device, dtype: torch.dtype) -> None:
    compare(CONFIGS[config], "int8", device, dtype)


@pytest.mark.parametrize("format", [*FORMATS, "mixed"])
def test_every_format(format: str, device: torch.device, dtype: torch.dtype) -> None:
    compare(CONFIGS["two-layers"], format, device, dtype)


def test_kv_of_eight_bits(device: torch.device, dtype: torch.dtype) -> None:
    forward, oracle = forwards(PLAIN, "int8", device, dtype, torch.float8_e4m3fn)
    for start, stop in ((0, 30), (30, 34)):
        batch = rows_of((TOKENS, start, stop, PAGES))
        wanted = oracle(moved(batch, device)).logits.cpu()
        error = (forward(batch).logits - wanted).norm() / wanted.norm()
        assert 1e-4 < error < 0.3


@pytest.mark.skipif(not ON_GPU, reason="the interpreter multiplies by a library that chooses its order by the shape")
def test_bits_of_a_row_depend_on_nothing_else(device: torch.device, dtype: torch.dtype) -> None:
    """The same positions computed as one prompt, in chunks, one by one, and beside another sequence."""
    wanted = None
    for cuts in ((0, 100), (0, 7, 71, 100), (0, 60, *range(61, 101))):
        forward, _ = forwards(CONFIGS["two-layers"], "mixed", device, dtype)
        logits = []
        for start, stop in pairwise(cuts):
            works = [(TOKENS, start, stop, PAGES)] + ([(TOKENS, 0, 9, OTHER)] if start else [])
            logits.append(forward(rows_of(*works)).logits[: stop - start])
        whole = torch.cat(logits)
        wanted = whole if wanted is None else wanted
        assert torch.equal(whole, wanted)
