"""Compiling the C kernels: the choice of a variant, the place of its library, and messages where it fails."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.errors import UnknownOption
from paceline.kernels.cpu import build
from paceline.kernels.cpu.pool import default_threads


def test_the_widest_variant_is_chosen_unless_another_is_named(monkeypatch):
    monkeypatch.delenv("PACELINE_CPU_VARIANT", raising=False)
    every = build.NEEDS["avx512bf16"] | {"sse2"}
    found = {
        "avx512bf16": every,
        "avx512": every - {"avx512_bf16"} | {"avx_vnni"},
        "avxvnni": every - {"avx512f"} | {"avx_vnni"},
        "avx2": every - {"avx512_vnni"},
        "portable": set(),
    }
    for wanted, features in found.items():
        monkeypatch.setattr(build, "cpu_features", lambda features=features: frozenset(features))
        assert build.choose_variant() == wanted
    monkeypatch.setenv("PACELINE_CPU_VARIANT", "portable")
    assert build.choose_variant() == "portable"
    monkeypatch.setenv("PACELINE_CPU_VARIANT", "avx51")
    with pytest.raises(UnknownOption, match="avx512"):
        build.choose_variant()


def test_no_flag_binds_the_library_to_this_machine():
    flags = [*build.FLAGS, *(flag for flags in build.VARIANTS.values() for flag in flags)]
    assert not [flag for flag in flags if "native" in flag or "amx" in flag or "fast-math" in flag]
    assert "-ffp-contract=off" in flags


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """A cache of the test's own and one tiny source, so that compiling takes no time."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.c").write_text("int one(void) { return 1; }\n")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "paceline"))
    monkeypatch.setattr(build, "SOURCES", sources)
    return sources


def test_a_library_is_compiled_once_and_anew_when_a_source_changes(quick):
    first = build.library_path("portable")
    stamp = first.stat().st_mtime_ns
    assert first.parent.name == "paceline"
    assert build.library_path("portable") == first
    assert first.stat().st_mtime_ns == stamp
    (quick / "one.c").write_text("int one(void) { return 2; }\n")
    assert build.library_path("portable") != first
    assert [path.suffix for path in first.parent.iterdir()] == [".so", ".so"]


def test_several_may_compile_at_once(quick):
    with ThreadPoolExecutor(3) as workers:
        paths = list(workers.map(build.library_path, ["portable"] * 3))
    assert len(set(paths)) == 1
    assert list(paths[0].parent.iterdir()) == [paths[0]]


@pytest.mark.parametrize(("cc", "said"), [("/nowhere/cc", "cannot be run"), ("false", "failed")])
def test_a_compiler_that_does_not_work_is_named(quick, monkeypatch, cc, said):
    monkeypatch.setenv("CC", cc)
    with pytest.raises(build.NoCompiler, match=said) as error:
        build.library_path("portable")
    assert cc in str(error.value)


def test_a_source_that_does_not_compile_says_why_and_leaves_nothing(quick):
    (quick / "one.c").write_text("int one(void) { return }\n")
    with pytest.raises(build.NoCompiler, match="error"):
        build.library_path("portable")
    assert list(build.cache_home().iterdir()) == []


@pytest.mark.parametrize("variant", ["avx512bf16", "avxvnni", "avx2"])
def test_a_compiler_may_be_older_than_the_cpu(monkeypatch, variant):
    def load(wanted):
        if wanted == variant:
            raise build.NoCompiler(f"no {wanted}")
        return wanted

    monkeypatch.setenv("PACELINE_CPU_VARIANT", variant)
    monkeypatch.setattr(build, "_load", load)
    if variant in build.OLDER:
        assert build.load_library() == {"avx512bf16": "avx512", "avxvnni": "avx2"}[variant]
    else:
        with pytest.raises(build.NoCompiler, match="no avx2"):
            build.load_library()


def test_no_compiler_at_all(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(build.NoCompiler, match="install gcc or clang"):
        build.compiler()


def test_threads_are_the_cores_this_process_may_use():
    assert 1 <= default_threads() <= (os.cpu_count() or 1)


def test_a_home_that_cannot_be_written_has_a_temporary_library(quick, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file" / "cache"))
    assert build.library_path("portable").is_file()
    assert "the compiled kernels are not cached" in caplog.text
