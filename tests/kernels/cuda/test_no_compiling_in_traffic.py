"""No step waits for a kernel to be compiled, nor for a comparison of a product's ways: the start knows them all."""

from __future__ import annotations

import pytest

from tests.kernels.cuda.compiled_scripts import run_script


@pytest.mark.parametrize("words", [("eager",), pytest.param((), marks=pytest.mark.slow)], ids=["eager", "recorded"])
def test_the_start_knows_every_kernel_of_traffic(words: tuple[str, ...]) -> None:
    """Over random steps, with heads, trees, blocks, n-grams and models; launched one by one, or from graphs."""
    found = run_script("varied_traffic.py", *words)
    assert len(found) == 5
    for drafters, noted in found.items():
        assert not noted["late"], f"{drafters} compiled in a step"
        assert noted["comparisons"] == 0, f"{drafters} compared ways in a step"
        assert noted["known"] < 220, "each kernel lengthens a cold start"
