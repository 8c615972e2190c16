"""The real compiler, for the real machine: kernels must compile and fit the shared memory of a processor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.cuda import conftest

HOPPER = 232448  # bytes of shared memory that a program may have


@pytest.mark.parametrize(("words", "count"), [((), 16), pytest.param(("all",), 27, marks=pytest.mark.slow)])
def test_kernels_fit_the_shared_memory_of_hopper(words: tuple[str, ...], count: int) -> None:
    script = Path(conftest.__file__).with_name("compile_for_hopper.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, script, *words], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == count
    too_large = {name: size for name, size in found.items() if size > HOPPER}
    assert not too_large
