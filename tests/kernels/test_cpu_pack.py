"""Packing from stored rows in C: the bytes are those of the torch path, for every type, format, variant and order."""

from __future__ import annotations

from ctypes import c_uint8
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from paceline.kernels.cpu.abi import Format, Stored
from paceline.kernels.cpu.build import load_library
from paceline.kernels.cpu.pack import Layout, Pack, Rows, stored, tile_format
from paceline.kernels.quant import GROUP, Quantised, quantise
from paceline.models.gguf import GgufFile, TensorInfo
from paceline.models.gguf_blocks import float_rows, native_rows
from tests.kernels.tiny_forward import RUNNABLE
from tests.models.test_gguf import OTHERS, random_rows

FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"bits": 8},
    "8 bits in groups": {"bits": 8, "group": GROUP},
    "int4": {"bits": 4, "group": GROUP},
}
OUTPUTS, INPUTS = 37, 512  # the last tile is not full
FLOATS = {Stored.F32: torch.float32, Stored.F16: torch.float16, Stored.BF16: torch.bfloat16}


def rows_of(kind: Stored) -> np.ndarray:
    if kind in FLOATS:
        return (torch.randn(OUTPUTS, INPUTS) / 20).to(FLOATS[kind]).view(torch.uint8).numpy()
    return random_rows(Kind[kind.name], rows=OUTPUTS, width=INPUTS)


def reference(data: np.ndarray, kind: Stored, format: str) -> Quantised:
    """Quantise in torch."""
    if format == "native":
        weight = native_rows(data, Kind[kind.name], "here")
        return quantise(weight, bits=8, group=GROUP) if isinstance(weight, Tensor) else weight
    return quantise(float_rows(data, Kind[kind.name], "here").float(), **FORMATS[format])


def empty(weight: Quantised, threads: int = 2) -> Pack:
    layout = Layout(load_library())
    layout.tiles(("w", tile_format(weight), OUTPUTS, INPUTS))
    return Pack(layout, threads=threads)


def bytes_of(pack: Pack) -> bytes:
    return bytes((c_uint8 * pack.layout.size).from_address(pack.memory.address))


@pytest.mark.parametrize("variant", RUNNABLE)
@pytest.mark.parametrize("format", ["native", *FORMATS])
def test_every_type_packs_to_the_bytes_of_torch(variant: str, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CPU_VARIANT", variant)
    for kind in Stored:
        data = rows_of(kind)
        weight = reference(data, kind, format)
        expected, found = empty(weight), empty(weight)
        expected.write("w", weight)
        assert found.write_rows("w", Rows(kind, data), keep=format == "native"), kind.name
        assert bytes_of(found) == bytes_of(expected), kind.name


@pytest.mark.parametrize("kind", [kind for kind in OTHERS if kind.name not in Stored.__members__])
def test_types_that_c_does_not_know_come_as_floats(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    data = random_rows(kind, rows=OUTPUTS, width=INPUTS)
    file = GgufFile.__new__(GgufFile)
    file.path, file.tensors = Path("here"), {"w": TensorInfo("w", (OUTPUTS, INPUTS), kind, 0, data.size)}
    monkeypatch.setattr(GgufFile, "_rows", lambda self, name, start, stop: data[start:stop])
    rows, weight = file.read_stored("w", 0, OUTPUTS), native_rows(data, kind, "here")
    assert isinstance(weight, Quantised)
    expected, found = empty(weight), empty(weight)
    expected.write("w", weight)
    assert rows.kind == Stored.F32
    assert found.write_rows("w", rows, keep=True)
    assert bytes_of(found) == bytes_of(expected)


@pytest.mark.parametrize("format", FORMATS)
def test_numbers_of_every_size(format: str) -> None:
    """Groups of zeros, of tiny, huge and lopsided numbers: rounding to fp16 has its corners there."""
    sizes = 10.0 ** torch.arange(-12, 4).repeat_interleave(GROUP)
    weight = torch.randn(OUTPUTS, INPUTS) * sizes
    weight[3] += sizes * 7
    weight[4] = 0
    weight[5, ::2] = 0
    weight[6] = sizes  # all the same
    rounded = quantise(weight, **FORMATS[format])
    expected, found = empty(rounded), empty(rounded)
    expected.write("w", rounded)
    assert found.write_rows("w", stored(weight))
    assert bytes_of(found) == bytes_of(expected)


def test_rows_come_in_pieces_and_in_another_order() -> None:
    data, order = rows_of(Stored.Q4_K), torch.randperm(OUTPUTS)
    weight = reference(data, Stored.Q4_K, "native").each(lambda part: part[order])
    places = order.argsort().int()
    expected, found = empty(weight), empty(weight)
    expected.write("w", weight)
    for start in range(0, OUTPUTS, 5):
        rows, some = Rows(Stored.Q4_K, data[start : start + 5]), places[start : start + 5].contiguous()
        assert found.write_rows("w", rows, places=some, keep=True)
    assert bytes_of(found) == bytes_of(expected)
    straight = empty(weight)
    for start in range(0, OUTPUTS, 5):
        assert straight.write_rows("w", Rows(Stored.Q4_K, data[start : start + 5]), first=start, keep=True)
    expected.write("w", reference(data, Stored.Q4_K, "native"))
    assert bytes_of(straight) == bytes_of(expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("format", [Format.CHANNEL8, Format.GROUP8, Format.GROUP4])
def test_numbers_that_are_not_finite_are_reported(bad: float, format: Format) -> None:
    weight = torch.randn(OUTPUTS, INPUTS)
    layout = Layout(load_library())
    layout.tiles(("w", format, OUTPUTS, INPUTS))
    assert Pack(layout).write_rows("w", stored(weight))
    weight[OUTPUTS - 1, 99] = bad
    assert not Pack(layout).write_rows("w", stored(weight))


def test_scales_beyond_fp16_are_reported() -> None:
    data = rows_of(Stored.Q4_K)
    data[2, 0:2] = np.array([60000.0], np.float16).view(np.uint8)  # times a scale of up to 63
    data[2, 4:8] = 63
    pack = empty(reference(rows_of(Stored.Q4_K), Stored.Q4_K, "native"))
    assert not pack.write_rows("w", Rows(Stored.Q4_K, data), keep=True)


def test_a_checksum_sees_every_byte_and_no_threads() -> None:
    layout = Layout(load_library())
    layout.vector("v", 700_000)  # more than two pieces
    sums = set()
    one, two = Pack(layout, threads=1), Pack(layout, threads=2)
    values = torch.randn(700_000)
    for at in (None, 0, 262_143, 262_144, 699_999):
        if at is not None:
            values[at] += 1
        one.write("v", values)
        two.write("v", values)
        assert one.checksum() == two.checksum()
        sums.add(one.checksum())
    assert len(sums) == 5
