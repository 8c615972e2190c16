from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.kernels.cpu.build import load_library
from tests.cli.conftest import Cli


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    load_library()  # compiled in the cache of all tests
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PACELINE_CACHE_SIZE")
    return tmp_path / "cache"


def test_packs_are_listed_and_cleared(cli: Cli, tiny: str, home: Path) -> None:
    status, out, _ = cli("cache")
    assert (status, out) == (0, f"{home}/packed\n0.0 MiB in 0 packs, of 10.00 GiB\n")
    cli("generate", tiny, "a", "--format", "int8", "--max-tokens", "1", "--threads", "1")
    status, out, err = cli("cache", "list")
    assert (status, err) == (0, "")
    assert f"{tiny} (int8, " in out
    assert "in 1 packs, of 10.00 GiB" in out
    found = json.loads(cli("cache", "--json")[1])
    [pack] = found["packs"]
    assert (pack["model"], pack["format"], pack["bytes"]) == (tiny, "int8", found["bytes"])
    assert Path(pack["path"]).stat().st_size == found["bytes"]
    status, out, _ = cli("cache", "clear", "--json")
    assert json.loads(out)["freed_bytes"] == found["bytes"]
    assert list((home / "packed").iterdir()) == []
    assert not (home / "digests").exists()
    assert cli("cache", "clear")[1] == "freed 0.0 MiB\n"


def test_a_damaged_pack_is_listed_and_cleared(cli: Cli, home: Path) -> None:
    (home / "packed").mkdir(parents=True)
    (home / "packed" / "0.pack").write_bytes(b"nonsense")
    assert "damaged (damaged, damaged)" in cli("cache")[1]
    cli("cache", "clear")
    assert list((home / "packed").iterdir()) == []


def test_a_cache_that_is_off(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE_SIZE", "0")
    assert "of nothing: the cache is off" in cli("cache")[1]
    monkeypatch.setenv("PACELINE_CACHE_SIZE", "much")
    status, _, err = cli("cache")
    assert status == 2
    assert "PACELINE_CACHE_SIZE is 'much'" in err


def test_listing_needs_no_torch() -> None:
    code = "import sys; from paceline.cli.main import main; main(['cache']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_stages_are_timed(cli: Cli, tiny: str) -> None:
    _, _, err = cli("generate", tiny, "a", "--format", "int8", "--max-tokens", "1", "--threads", "1", "--verbose")
    for stage in ("read the headers of", "make the tokenizer of", "digest of", "pack", "write the packed weights of"):
        assert f"{stage} {tiny}: " in err
    assert "load everything, after imports: " in err
    assert "s of CPU, peak memory " in err
