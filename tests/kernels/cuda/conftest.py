"""Devices and types for tests of kernels: Triton's interpreter on the CPU, or the compiler if PACELINE_GPU is set."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="kernels for GPUs are written in Triton")

import triton.language as tl
from triton.runtime import interpreter

ON_GPU = "PACELINE_GPU" in os.environ


def let_numbers_bound_loops() -> None:
    """Triton's interpreter holds a scalar as an array of one, which NumPy 2.4 no longer takes for a whole number."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: object, scope: interpreter._LangPatchScope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def launch_faster() -> None:
    """The interpreter replaces Triton's language with its own for every launch, and again for every call inside of one,
    which was a third of its time. And coverage watches its every line, which takes longer than the lines do."""
    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched: set[frozenset[int]] = set()  # by this launch: which modules of the language

    def patch_once(function: Callable[..., object]) -> interpreter._LangPatchScope:
        seen = frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)
        if seen in patched:
            return interpreter._LangPatchScope()  # nothing to restore
        patched.add(seen)
        return patch(function)

    def launch_untraced(self: interpreter.GridExecutor, *args: object, **options: object) -> None:
        trace = sys.gettrace()
        sys.settrace(None)
        patched.clear()
        try:
            launch(self, *args, **options)
        finally:
            sys.settrace(trace)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_untraced


let_numbers_bound_loops()
launch_faster()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture(params=[torch.float32, *([torch.bfloat16] if ON_GPU else [])], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Types of activations and KV memory. The interpreter cannot multiply bf16."""
    assert isinstance(request.param, torch.dtype)
    return request.param
