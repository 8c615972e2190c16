"""The real compiler, for the real machine: kernels must compile and fit the shared memory of a processor."""

from __future__ import annotations

import pytest

from tests.kernels.cuda.compiled_scripts import run_script

HOPPER = 232448  # bytes of shared memory that a program may have


@pytest.mark.parametrize(("words", "count"), [((), 16), pytest.param(("all",), 28, marks=pytest.mark.slow)])
def test_kernels_fit_the_shared_memory_of_hopper(words: tuple[str, ...], count: int) -> None:
    found = run_script("compile_for_hopper.py", *words)
    assert len(found) == count
    too_large = {name: size for name, size in found.items() if size > HOPPER}
    assert not too_large
