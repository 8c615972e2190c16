"""The same tests twice: by Triton's interpreter on the CPU, and compiled where PACELINE_GPU is set."""

from __future__ import annotations

import os
import sys

import pytest
import torch

pytest.importorskip("triton", reason="kernels for GPUs are written in Triton")

from triton.runtime import interpreter

ON_GPU = "PACELINE_GPU" in os.environ


def let_numbers_bound_loops() -> None:
    """Triton's interpreter holds a scalar as an array of one, which NumPy 2.4 no longer takes for a whole number."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: object, scope: interpreter._LangPatchScope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def launch_untraced() -> None:
    """Coverage watches every line of the interpreter too, which takes longer than the lines do."""
    launch = interpreter.GridExecutor.__call__

    def untraced(self: interpreter.GridExecutor, *args: object, **options: object) -> None:
        trace = sys.gettrace()
        sys.settrace(None)
        try:
            launch(self, *args, **options)
        finally:
            sys.settrace(trace)

    interpreter.GridExecutor.__call__ = untraced


let_numbers_bound_loops()
launch_untraced()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture(params=[torch.float32, *([torch.bfloat16] if ON_GPU else [])], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Of activations and KV memory. The interpreter cannot multiply bf16."""
    assert isinstance(request.param, torch.dtype)
    return request.param
