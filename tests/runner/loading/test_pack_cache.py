"""The cache of packed weights: what is found again, what is not, and what happens where there is no room."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import InvalidRequest, ModelFileError
from paceline.kernels.cpu.build import load_library
from paceline.kernels.cpu.pack import Pack
from paceline.kernels.cpu.pack_header import HEADER_BYTES
from paceline.models import digest
from paceline.models.load import load_model
from paceline.runner.forwards.decoder_pack import decoder_layout, pack_decoder, read_decoder
from paceline.runner.loading import models, pack_cache, pack_store
from paceline.runner.loading.models import ReadyModel, read_model
from tests.cli.tiny_model import write_model


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    load_library()  # compiled in the cache of all tests
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return write_model(tmp_path / "model")


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of sources that were packed."""
    names: list[str] = []

    def read(pack: Pack, source: Any, *rest: Any, **options: Any) -> None:
        names.append(source.label)
        read_decoder(pack, source, *rest, **options)

    monkeypatch.setattr(models, "read_decoder", read)
    return names


@pytest.fixture(autouse=True)
def _no_file_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "RACY_SECONDS", -1.0)  # the times of change of status cannot be set


def load(model: Path, format: Any = "int4") -> Pack:
    return read_model(str(model), format=format).packed(1)


def content(pack: Pack) -> bytes:
    return ctypes.string_at(pack.memory.address, pack.layout.size)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def packs(home: Path) -> list[Path]:
    return sorted((home / "packed").iterdir())


def test_a_second_start_reads_no_tensor(model: Path, packed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first = content(load(model))
    monkeypatch.setattr("paceline.models.safetensors.SafetensorsFolder.read_stored", None)
    monkeypatch.setattr("paceline.models.digest.hashlib.file_digest", None)  # nor is the file digested again
    assert content(load(model)) == first
    assert len(packed) == 1


def test_the_bytes_are_those_of_packing_in_memory(model: Path) -> None:
    for format in ("int8", "int4", "int4-all"):
        weights = load_model(str(model), format=format).weights
        assert content(load(model, format)) == content(pack_decoder(weights, threads=1))


def test_the_embedded_model_packs_to_the_same_bytes() -> None:
    """Q4_0, Q8_0 and rotary rows in another order; the oracle reads and packs in torch."""
    weights = load_model("smollm2").weights
    ready = read_model("smollm2")
    assert decoder_layout(ready.model.weights).items == decoder_layout(weights).items
    assert content(ready.packed(1)) == content(pack_decoder(weights, threads=1))


def test_progress_is_told_while_packing_and_once_when_found(model: Path) -> None:
    told: list[tuple[int, int]] = []
    counts = []
    for _ in range(2):
        read_model(str(model), format="int4", progress=lambda done, total: told.append((done, total))).packed(1)
        assert told[-1][0] == told[-1][1]
        counts.append(len(told))
    assert counts[0] > 20
    assert counts[1] == counts[0] + 1


def test_another_content_is_another_pack(model: Path, home: Path, packed: list[str]) -> None:
    """Size and times of modification are the same; only the time of the change of status differs."""
    load(model)
    file = model / "model.safetensors"
    before, data = file.stat(), bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    load(model)
    assert len(packed) == len(packs(home)) == 2


def test_a_file_that_was_only_touched_or_moved_is_found(model: Path, packed: list[str], tmp_path: Path) -> None:
    load(model)
    os.utime(model / "model.safetensors")
    load(model)
    load(model.rename(tmp_path / "elsewhere"))
    assert len(packed) == 1


def test_a_new_file_is_digested_again(model: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second write could fall into the same tick of the clock."""
    monkeypatch.setattr(digest, "RACY_SECONDS", 3600.0)
    load(model)
    assert not (home / "digests").exists()


@pytest.mark.parametrize("changed", ["format", "variant", "version", "config"])
def test_the_key_has_all_that_decides(changed: str, model: Path, packed: list[str], monkeypatch: Any) -> None:
    load(model)
    if changed == "variant":
        monkeypatch.setattr(pack_cache, "_variant", lambda: "another")
    if changed == "version":
        monkeypatch.setattr(pack_cache, "packer_version", lambda: "another")
    if changed == "config":
        text = (model / "config.json").read_text()
        (model / "config.json").write_text(text.replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 2e-05'))
        assert text != (model / "config.json").read_text()
    load(model, "int8" if changed == "format" else "int4")
    assert len(packed) == 2


def test_the_version_follows_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in pack_cache.PACKERS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((pack_cache.PACKAGE / name).read_bytes())
    monkeypatch.setattr(pack_cache, "PACKAGE", tmp_path)
    version = pack_cache.packer_version.__wrapped__
    before = version()
    assert before == pack_cache.packer_version()
    (tmp_path / "kernels/cpu/quantise.c").write_text("other")
    assert version() != before


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 999] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 64)


def headless(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"nonsense")


def emptied(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [flipped, cut, headless, emptied])
def test_a_damaged_pack_is_packed_again(
    damage: Callable[[Path], None], model: Path, home: Path, packed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    first = content(load(model))
    damage(packs(home)[0])
    assert pack_store.entries()
    assert content(load(model)) == first
    assert len(packed) == 2
    assert "is not used" in caplog.text
    load(model)
    assert len(packed) == 2  # sound again


def test_a_home_that_cannot_be_written(
    model: Path, packed: list[str], tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file" / "cache"))
    for format in ("int4", "int8"):
        weights = load_model(str(model), format=format).weights
        assert content(load(model, format)) == content(pack_decoder(weights, threads=1))
    assert len(warnings(caplog)) == 2
    assert all("cannot be written" in warning for warning in warnings(caplog))


def test_a_cache_that_may_only_be_read_is_used(model: Path, home: Path, packed: list[str], monkeypatch: Any) -> None:
    load(model)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    monkeypatch.setattr(os, "utime", _refused)
    load(model)
    assert len(packed) == 1


def _refused(*_: Any, **__: Any) -> None:
    raise OSError(errno.EROFS, "Read-only file system")


def _full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk(model: Path, home: Path, packed: list[str], monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(os, "fsync", _full)
    weights = load_model(str(model), format="int4").weights
    assert content(load(model)) == content(pack_decoder(weights, threads=1))
    assert packs(home) == []
    assert "are not cached: No space left on device" in caplog.text


def test_a_file_that_changes_while_it_is_read_is_not_kept(model: Path, home: Path, monkeypatch: Any) -> None:
    def read(*arguments: Any, **options: Any) -> None:
        read_decoder(*arguments, **options)
        os.utime(model / "model.safetensors")

    monkeypatch.setattr(models, "read_decoder", read)
    load(model)
    assert packs(home) == []


def test_a_model_with_bad_numbers_leaves_nothing(model: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pack, "write_rows", lambda *_, **__: False)
    with pytest.raises(ModelFileError, match="holds NaN or infinite values"):
        load(model)
    assert packs(home) == []


def test_the_least_recently_used_make_room(model: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {}
    for format in ("int8", "int4", "int4-all"):
        load(model, format)
        sizes[format] = {path: path.stat().st_size for path in packs(home)}
    [first] = sizes["int8"]
    second = next(path for path in sizes["int4"] if path != first)
    for seconds, path in enumerate((second, *(path for path in packs(home) if path not in (first, second)), first)):
        os.utime(path, (seconds, seconds))
    monkeypatch.setenv(pack_store.SIZE_VARIABLE, str(sum(path.stat().st_size for path in packs(home))))
    monkeypatch.setattr(pack_cache, "_variant", lambda: "another")
    load(model)
    assert not second.exists()
    assert first.exists()
    monkeypatch.setenv(pack_store.SIZE_VARIABLE, "1")
    pack_store.make_room(0)
    assert packs(home) == []


@pytest.mark.parametrize(("size", "words"), [("0", ""), ("1k", "are more than PACELINE_CACHE_SIZE allows")])
def test_no_cache(size: str, words: str, model: Path, home: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setenv(pack_store.SIZE_VARIABLE, size)
    load(model)
    assert not home.exists() or packs(home) == []
    assert len(warnings(caplog)) == bool(words)
    assert all(words in warning for warning in warnings(caplog))


def test_a_size_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(pack_store.SIZE_VARIABLE, "lots")
    with pytest.raises(InvalidRequest, match="PACELINE_CACHE_SIZE is 'lots'; give a size such as 10G, or 0"):
        pack_store.cache_limit()


def test_leftovers_of_killed_processes_are_swept(model: Path, home: Path) -> None:
    (home / "packed").mkdir(parents=True)
    dead, alive = home / "packed" / ".a-1.tmp", home / "packed" / ".b-2.tmp"
    dead.touch()
    with alive.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        load(model)
    assert not dead.exists()
    assert alive.exists()


def test_several_may_pack_at_once(model: Path, home: Path, packed: list[str]) -> None:
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(content(load(model)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert len(set(found)) == 1
    assert len(packs(home)) == 1


def test_a_forward_from_the_cache_computes_the_same(model: Path) -> None:
    def head(ready: ReadyModel) -> torch.Tensor:
        forward = ready.forward(num_pages=4, threads=1, max_context=40)
        return forward.embed(torch.arange(8, dtype=torch.int32))

    first = head(read_model(str(model), format="int4"))
    assert torch.equal(head(read_model(str(model), format="int4")), first)


def test_unread_weights_count_against_the_memory(model: Path) -> None:
    ready = read_model(str(model), format="int4")
    assert ready.unread_bytes == sum(part.bytes for part in ready.parts) > 0
    assert all(part.is_meta for part in ready.model.weights.values() if isinstance(part, torch.Tensor))
