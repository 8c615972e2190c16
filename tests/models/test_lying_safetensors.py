"""Headers of safetensors files with one false statement each: all are refused, and the error names the file."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ModelFileError
from paceline.models.safetensors import SafetensorsFolder

DATA = bytes(64)


def tensor(shape: list[Any], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


LIES: dict[str, dict[str, Any]] = {
    "offsets beyond the file": {"a": tensor([16], 0, 2**40)},
    "data beyond the file": {"a": tensor([32], 0, 128)},
    "negative offsets": {"a": tensor([16], -64, 0)},
    "an end before its start": {"a": tensor([16], 64, 0)},
    "overlapping": {"a": tensor([8], 0, 32), "b": tensor([12], 16, 64)},
    "a hole": {"a": tensor([4], 0, 16), "b": tensor([4], 48, 64)},
    "a shape of another size": {"a": tensor([15], 0, 64)},
    "a product that overflows": {"a": tensor([2**33, 2**31, 16], 0, 64)},
    "a product that wraps to the right size": {"a": tensor([2**62, 4, 4, 4], 0, 64)},
    "a negative side": {"a": tensor([-16], 0, 64)},
    "another type": {"a": tensor([16], 0, 64, dtype="F99")},
    "a type of another size": {"a": tensor([16], 0, 64, dtype="F16")},
}


def write(folder: Path, header: bytes, length: int | None = None) -> None:
    size = len(header) if length is None else length
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", size) + header + DATA)


def test_the_truth_is_read(tmp_path: Path) -> None:
    write(tmp_path, json.dumps({"a": tensor([16], 0, 64)}).encode())
    assert SafetensorsFolder(tmp_path).shapes() == {"a": (16,)}


@pytest.mark.parametrize("header", LIES.values(), ids=LIES.keys())
def test_a_lying_header_is_refused(header: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, json.dumps(header).encode())
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("length", [2**16, 2**40, 2**63, 2**64 - 1])
def test_a_header_longer_than_the_file_is_refused(length: int, tmp_path: Path) -> None:
    write(tmp_path, b"{}", length)
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        SafetensorsFolder(tmp_path)
