"""The decoder of launches against the one of plain torch, for every architecture and weight format."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.drafters import registry
from paceline.drafters.model import ModelOnDevice
from paceline.kernels.base import Batch
from paceline.kernels.cuda.compiling import rehearsal
from paceline.kernels.cuda.formats import CudaMatrix
from paceline.kernels.cuda.linear import Products
from paceline.kernels.quant import GROUP, dequantise, quantise, quantise_fp8
from paceline.models.config import ModelConfig
from paceline.models.load import LoadedModel
from paceline.runner.forwards.cuda import CudaDecoder, CudaForward, new_kv
from paceline.runner.forwards.device_batch import Ends
from paceline.runner.forwards.torch import TorchForward
from paceline.runner.loading.models import ReadyModel
from tests.kernels.cuda.conftest import ON_GPU
from tests.kernels.tiny_forward import CONFIGS, FORMATS, PLAIN, floats, random_weights, rows_of

TOKENS = [(7 * i * i + 3 * i) % 90 for i in range(170)]
PAGES = [9, 3, 4, 0, 7, 1, 11, 5, 2, 6, 8]
OTHER = [12, 14, 13, 10]
Step = list[tuple[int, int]]  # from where to where, of each sequence
ARCHITECTURES = [*CONFIGS]
if not ON_GPU:  # what "everything" has not
    ARCHITECTURES = ["many-heads", "wide-heads", "rope", "bias", "window", "everything"]


def forwards(
    config: ModelConfig,
    format: str,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    *,
    expand: bool = False,
) -> tuple[CudaForward, TorchForward]:
    weights = random_weights(config, format)
    oracle = TorchForward(config, floats(weights), num_pages=15, device=device)
    decoder = CudaDecoder(config, weights, max_context=240, dtype=dtype, device=device, pdl=ON_GPU, expand=expand)
    assert not weights, "a weight was not packed"
    return CudaForward(decoder, new_kv(config, num_pages=15, dtype=kv_dtype or dtype, device=device)), oracle


def moved(batch: Batch, device: torch.device) -> Batch:
    names = ("tokens", "positions", "slots", "row_starts", "bases", "page_table", "logit_rows")
    return Batch(**{name: getattr(batch, name).to(device) for name in names})


LONG = 150 if ON_GPU else 12
STEPS = [[(0, LONG)], [(LONG, LONG + 5), (0, 5)], [(LONG + 5, LONG + 6), (5, 6)]]  # prompt, verification, decoding


def compare(config: ModelConfig, format: str, device: torch.device, dtype: torch.dtype, steps: list[Step]) -> None:
    forward, oracle = forwards(config, format, device, dtype)
    limit = 1e-4 if dtype is torch.float32 else 0.08
    for works in steps:
        rows = [(TOKENS, *work, pages) for work, pages in zip(works, (PAGES, OTHER), strict=False)]
        batch = rows_of(*rows)
        got, wanted = forward(batch), oracle(moved(batch, device)).logits.cpu()
        error = (got.logits - wanted).norm() / wanted.norm()
        assert error < limit, f"{works}: {error}"
        assert torch.equal(got.argmax, got.logits.argmax(-1).int())


@pytest.mark.parametrize("config", ARCHITECTURES)
def test_every_architecture(config: str, device: torch.device, dtype: torch.dtype) -> None:
    compare(CONFIGS[config], "int8", device, dtype, STEPS)


@pytest.mark.parametrize("format", [*FORMATS, "mixed"])
def test_every_format(format: str, device: torch.device, dtype: torch.dtype) -> None:
    compare(CONFIGS["two-layers"] if ON_GPU else PLAIN, format, device, dtype, STEPS if ON_GPU else STEPS[:1])


@pytest.mark.parametrize("ending", [(1, 0), (2, 1), (0, 0)])
@pytest.mark.parametrize("config", ["two-layers", "everything"] if ON_GPU else ["rope"])
def test_the_last_layer_computes_wanted_rows_only(
    config: str,
    ending: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their bits, and all keys and values, are those of a pass that computes everything."""
    made, counts = CONFIGS[config], (LONG, 9)
    (whole, _), (part, _) = (forwards(made, "int8", device, dtype) for _ in range(2))
    rows = whole._placed(rows_of((TOKENS, 0, LONG, PAGES), (TOKENS, 2, 2 + counts[1], OTHER)))
    spans = [range(stop - last, stop) for stop, last in zip((LONG, sum(counts)), ending, strict=True)]
    seats = [seat for seat, span in enumerate(spans) if span]
    ends = Ends(
        index=torch.tensor([row for span in spans for row in span], dtype=torch.int64, device=device),
        row_starts=torch.tensor([0, *accumulate(len(spans[seat]) for seat in seats)]).int().to(device),
        lanes=torch.tensor(seats).int().to(device),
        seats=len(seats),
        max_rows=max(ending),
    )
    rows = replace(rows, lanes=torch.tensor([0, 1]).int().to(device))
    wanted = whole.decoder.hidden(rows, whole.kv)[ends.index].clone()
    multiplied, multiply = [], Products.__call__

    def spy(self: Products, x: Tensor, matrix: CudaMatrix, *rest: Any, **options: Any) -> None:
        multiplied.extend([len(x)] if matrix is part.decoder.layers[-1].gate_up else [])
        multiply(self, x, matrix, *rest, **options)

    monkeypatch.setattr(Products, "__call__", spy)
    got = part.decoder.hidden(rows, part.kv, ends=ends)
    assert torch.equal(got, wanted)
    pages = [*PAGES, *OTHER]  # all but the scratch page, which rows that only pad may be written to
    assert torch.equal(part.kv.keys[:, pages], whole.kv.keys[:, pages])
    assert torch.equal(part.kv.values[:, pages], whole.kv.values[:, pages])
    assert multiplied == ([sum(ending)] if sum(ending) else [])


def test_kv_of_eight_bits(device: torch.device, dtype: torch.dtype) -> None:
    forward, oracle = forwards(PLAIN, "int8", device, dtype, torch.float8_e4m3fn)
    for start, stop in ((0, 30), (30, 34)):
        batch = rows_of((TOKENS, start, stop, PAGES))
        wanted = oracle(moved(batch, device)).logits.cpu()
        error = (forward(batch).logits - wanted).norm() / wanted.norm()
        assert 1e-4 < error < 0.3


QUANTISED = {
    "int8": lambda weight: quantise(weight, bits=8),
    "fp8": quantise_fp8,
    "int4": lambda weight: quantise(weight, bits=4, group=GROUP),
}


@pytest.mark.parametrize(("format", "tied"), [("int8", False), ("fp8", True), ("int4", False)])
def test_a_copy_in_fewer_bits(format: str, tied: bool, device: torch.device, dtype: torch.dtype) -> None:
    """The copy's matrices are rounded, the embedding is not; the original gives the same logits as before."""
    config = replace(PLAIN, tied_head=tied, qkv_bias=True)
    made = floats(random_weights(config, "int8"))
    rounded = {
        name: dequantise(QUANTISED[format](w.to(dtype))) if w.dim() == 2 and name != "embed" else w
        for name, w in made.items()
    }
    if tied:  # the copy's head is rounded: the oracle has one of its own
        rounded["head"] = dequantise(QUANTISED[format](made["embed"].to(dtype)))
    oracle = TorchForward(replace(config, tied_head=False), rounded, num_pages=15, device=device)
    decoder = CudaDecoder(config, dict(made), max_context=240, dtype=dtype, device=device, pdl=ON_GPU)
    copy = decoder.quantised(format)
    target = CudaForward(decoder, new_kv(config, num_pages=15, dtype=dtype, device=device))
    drafter = CudaForward(copy, new_kv(config, num_pages=15, dtype=dtype, device=device))
    batch = rows_of((TOKENS, 0, 9, PAGES))
    before, got, after = (forward(batch).logits.clone() for forward in (target, drafter, target))
    wanted = oracle(moved(batch, device)).logits.cpu()
    assert (got - wanted).norm() / wanted.norm() < (1e-4 if dtype is torch.float32 else 0.08)
    assert torch.equal(before, after)
    assert not torch.equal(before, got)
    assert copy.embedding is decoder.embedding
    assert copy.weight_bytes < decoder.weight_bytes
    assert not copy._buffers.keys() - decoder._buffers.keys()
    own, other = ({part.data_ptr() for parts in made._buffers.values() for part in parts} for made in (copy, decoder))
    assert own
    assert not own & other


def test_the_target_drafts_for_itself(device: torch.device, dtype: torch.dtype) -> None:
    """The drafter self:int4 is built as a copy that shares the target's KV memory."""
    made = floats(random_weights(PLAIN, "int8"))
    decoder = CudaDecoder(PLAIN, made, max_context=240, dtype=dtype, device=device, pdl=ON_GPU)
    model = LoadedModel("hf", Path("target"), PLAIN, {}, {}, {})
    ready = ReadyModel("target", model, None, compiled=False, why="a test", decoder=decoder, kv_format="fp8")
    forward = ready.forward(num_pages=3, threads=None, max_context=40)
    assert isinstance(forward, CudaForward)
    assert (ready.device, ready.pass_bytes) == (str(decoder.device), decoder.weight_bytes)
    assert forward.kv.keys.nbytes + forward.kv.values.nbytes == 4 * ready.page_bytes
    recipe = registry.recipe("self:int4", ready)
    assert recipe.build(None) is None
    assert recipe.page_bytes == 0
    assert recipe.on_device is not None
    drafter = recipe.on_device(None, forward)
    assert isinstance(drafter, ModelOnDevice)
    assert drafter.reader is None
    assert isinstance(drafter.forward, CudaForward)
    assert drafter.forward.kv is forward.kv
    assert drafter.forward.decoder.weight_bytes < decoder.weight_bytes / 2


CUTS = [(0, 100), (0, 7, 71, 100), (0, 60, *range(61, 101))] if ON_GPU else [(0, 18), (0, 3, 17, 18)]


def test_bits_of_a_row_depend_on_nothing_else(device: torch.device, dtype: torch.dtype) -> None:
    """The same positions computed as one prompt, in chunks, one by one, and beside another sequence."""
    wanted = None
    for cuts in CUTS:
        forward, _ = forwards(CONFIGS["two-layers" if ON_GPU else "plain"], "mixed", device, dtype)
        logits = []
        for start, stop in pairwise(cuts):
            works = [(TOKENS, start, stop, PAGES)] + ([(TOKENS, 0, 9, OTHER)] if start else [])
            logits.append(forward(rows_of(*works)).logits[: stop - start].clone())
        whole = torch.cat(logits)
        wanted = whole if wanted is None else wanted
        assert torch.equal(whole, wanted)


def test_expanded_weights_give_the_same_text(device: torch.device, dtype: torch.dtype) -> None:
    """On a GPU by bits; the interpreter adds up the products of a step in another order."""
    packed, whole = (forwards(PLAIN, "int4", device, dtype, expand=expand)[0] for expand in (False, True))
    assert whole.decoder.weight_bytes > 2 * packed.decoder.weight_bytes
    batch = rows_of((TOKENS, 0, 9, PAGES))
    one, other = packed(batch).logits, whole(batch).logits
    assert torch.equal(one, other) if ON_GPU else torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def test_small_passes_use_the_memory_of_large_ones(device: torch.device) -> None:
    """After the largest pass nothing grows, so that recorded rounds and prompts share one address."""
    decoder = CudaDecoder(
        PLAIN,
        floats(random_weights(PLAIN, "int8", seed=0)),
        max_context=64,
        dtype=torch.float32,
        device=device,
        pdl=ON_GPU,
    )
    large = decoder._buffer("x", 40, 8)
    assert [decoder._buffer("x", rows, 8).data_ptr() for rows in (1, 40, 64)] == [large.data_ptr()] * 3
    assert decoder._buffer("x", 65, 8).data_ptr() != large.data_ptr()
    assert [len(part) for part in decoder._buffers["x"]] == [64, 128], "recorded rounds still use the first"


@pytest.mark.parametrize(("windows", "passed"), [((), [0, 3]), ((7, 0, 7, 0), [0, 1, 3])])
def test_a_rehearsal_runs_one_layer_of_each_kind(windows: tuple[int, ...], passed: list[int]) -> None:
    """And the last one, which may compute fewer rows; with taps also the layers whose input is kept."""
    config = replace(PLAIN, num_layers=4, windows=windows)
    forward, _ = forwards(config, "int8", torch.device("cpu"), torch.float32)
    assert [*forward.decoder._passed(())] == [0, 1, 2, 3]
    with rehearsal():
        assert [*forward.decoder._passed(())] == passed
        assert [*forward.decoder._passed((2, 4))] == sorted({*passed, 2})
