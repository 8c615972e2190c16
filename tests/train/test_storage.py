from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from paceline.errors import ModelFileError, StorageError
from paceline.train import storage
from paceline.train.seeds import seeded_generator
from paceline.train.storage import read_tensors, replace_folder, write_bytes, write_tensors


def fail_with(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(storage.os, "fsync", fsync)


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bytes(tmp_path / "file", b"old")
    fail_with(monkeypatch, errno.ENOSPC)
    with pytest.raises(StorageError, match=r"disk is full.*nothing that was there is lost.*same command again"):
        write_bytes(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot be written"):
        write_bytes(tmp_path / "file" / "inside", b"x")


def test_tensors_come_back_with_their_note(tmp_path: Path) -> None:
    write_tensors(tmp_path / "t", {"a": torch.arange(3)}, note="hello")
    tensors, note = read_tensors(tmp_path / "t")
    assert tensors["a"].tolist() == [0, 1, 2]
    assert note == "hello"


@pytest.mark.parametrize("data", [b"", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0{}trailing"])
def test_a_broken_file_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(ModelFileError, match="not readable"):
        read_tensors(tmp_path / "t")


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    replace_folder(out, {"a": b"1", "b": b"2"})
    replace_folder(out, {"a": b"3"})
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {"a": b"3"}
    fail_with(monkeypatch, errno.ENOSPC)
    with pytest.raises(StorageError):
        replace_folder(out, {"a": b"4"})
    assert (out / "a").read_bytes() == b"3"


def test_seeds_differ_in_every_part() -> None:
    draws = {
        torch.rand((), generator=seeded_generator(*parts)).item() for parts in [(0, 0), (0, 1), (1, 0), (0,), (0, 0, 0)]
    }
    assert len(draws) == 5
