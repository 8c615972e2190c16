"""Kernels are compiled instead of launched, within a block and no longer."""

from __future__ import annotations

from typing import Any

import pytest
from triton import JITFunction

from paceline.kernels.cuda.compiling import compiling, only_compiling


@pytest.mark.parametrize("fails", [False, True])
def test_launches_compile(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, Any]] = []

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        seen.append((warmup, grid))

    monkeypatch.setattr(JITFunction, "run", launch)
    kernel = JITFunction.__new__(JITFunction)
    try:
        with compiling():
            assert only_compiling()
            kernel[(3,)]()
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert not only_compiling()
    kernel[(4,)]()
    assert seen == [(True, (3,)), (False, (4,))]
