"""Devices and types for tests of kernels: Triton's interpreter on the CPU, or the compiler if PACELINE_GPU is set."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="kernels for GPUs are written in Triton")

import triton.language as tl
from triton.runtime import interpreter

ON_GPU = "PACELINE_GPU" in os.environ
Handle = interpreter.TensorHandle
DEEP = 16  # products that are added before they go into the accumulator: as a tensor core does it, whatever the block


def let_numbers_bound_loops() -> None:
    """Triton's interpreter holds a scalar as an array of one, which NumPy 2.4 no longer takes for a whole number."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: object, scope: interpreter._LangPatchScope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def launch_faster() -> None:
    """Spare the interpreter what is for nothing.

    It replaces Triton's language with its own for every launch and restores it, and again for every call inside of one:
    half of its time. Nobody needs Triton's own between launches. It computes whether a sum of integers overflows, for
    an assertion that is off: a quarter of the rest. It lists all types to find one. And coverage watches its every
    line, which takes longer than the lines do.
    """
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    find, types = interpreter._get_np_dtype, {}

    def found(kind: tl.dtype) -> np.dtype:
        name = kind.scalar.name
        if name not in types:
            types[name] = find(kind)
        return types[name]

    interpreter._get_np_dtype = found
    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched: set[frozenset[int]] = set()  # which modules of the language

    def patch_once(function: Callable[..., object]) -> interpreter._LangPatchScope:
        seen = frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)
        if seen not in patched:
            patched.add(seen)
            patch(function)
        return interpreter._LangPatchScope()  # nothing to restore

    def launch_untraced(self: interpreter.GridExecutor, *args: object, **options: object) -> None:
        trace = sys.gettrace()
        sys.settrace(None)
        try:
            launch(self, *args, **options)
        finally:
            sys.settrace(trace)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_untraced


def describe_once() -> None:
    """Let values of one type share the description of it: a third of the time that `launch_faster` leaves.

    The interpreter makes a type and a shape for every value, and a type of that shape, for which nobody asks. Not for
    the compiler, whose classes these are too."""
    blocks, shapes = dict[object, dict[str, object]](), dict[tuple[int, ...], tuple[tl.tuple, tl.constexpr]]()
    check_block = tl.block_type.__init__

    def block(self: tl.block_type, element_ty: tl.dtype, shape: Sequence[object]) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in blocks:
            check_block(self, element_ty, shape)
            blocks[key] = self.__dict__
        self.__dict__ = blocks[key]

    def tensor(self: tl.tensor, handle: Handle, type: tl.dtype) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in shapes:
            shapes[sizes] = tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[sizes]

    def values(self: tl.tuple, args: Iterable[object], type: object = None) -> None:
        self.values = [*args]
        self.given = type if type is None or isinstance(type, tl.core.tuple_type) else tl.core.tuple_type(type)

    tl.block_type.__init__, tl.tensor.__init__, tl.tuple.__init__ = block, tensor, values
    tl.tuple.type = property(lambda self: self.given or tl.core._type_for_tuple_values(self.values))


def add_in_one_order() -> None:
    """Give products and sums one order of additions, whatever the shape and the CPU.

    The interpreter leaves them to NumPy, whose BLAS chooses the order by the shape, by a row's place in it and by the
    CPU. A test of the bits of a kernel would then be a test of BLAS.
    """
    numpys = interpreter.ReduceOps.sum

    def dot(self: object, a: Handle, b: Handle, d: Handle, *precision: object) -> Handle:
        assert {x.data.dtype for x in (a, b, d)} == {np.dtype(np.float32)}, "only products of float32 have one order"
        terms = a.data.T[:, :, None] * b.data[:, None, :]  # [inner, rows, columns]
        total = d.data
        for part in halved(terms.reshape(-1, DEEP, *terms.shape[1:]).swapaxes(0, 1)):
            total = total + part
        return Handle(total, d.dtype.scalar)

    def total(self: interpreter.ReduceOps, input: tl.tensor) -> tl.tensor:
        terms = input.handle.data
        if terms.dtype.kind != "f":
            return numpys(self, input)  # exact in any order
        assert not self.keep_dims
        terms = terms.reshape(-1) if self.axis is None else np.moveaxis(terms, self.axis, 0)
        return self.to_tensor(halved(terms), input.dtype)

    interpreter.InterpreterBuilder.create_dot = dot
    interpreter.ReduceOps.sum = total


def halved(terms: np.ndarray) -> np.ndarray:
    """Sum over the first dimension: add its second half to its first until one term is left.

    Each addition is elementwise, and IEEE 754 fixes its result to the bit.
    """
    while len(terms) > 1:
        half, odd = divmod(len(terms), 2)
        assert not odd, "Triton's shapes are powers of two"
        terms = terms[:half] + terms[half:]
    return terms[0]


class Bounds:
    """The memory of the tensors that a launch is given. An access elsewhere is an error.

    The interpreter reads any address. What lies there is another tensor's or an earlier test's, so that a kernel that
    reads beside its tensors fails once in many runs, and one that writes there breaks something else.
    """

    def __init__(self, memory: object) -> None:
        self._memory = memory  # the interpreter's module that reads and writes
        self._ranges = np.zeros((0, 2), np.uint64)  # [tensors, (start, end)] in bytes, by their starts
        self._kernel = ""

    def __getattr__(self, name: str) -> object:
        return getattr(self._memory, name)

    def begin(self, kernel: str, arguments: Iterable[object]) -> None:
        storages = (each.untyped_storage() for each in tensors_of(arguments))
        ranges = sorted({(each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages})
        self._ranges, self._kernel = np.array(ranges, np.uint64).reshape(-1, 2), kernel

    def load(self, at: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: np.dtype) -> np.ndarray:
        self._check(at, mask, np.dtype(dtype).itemsize)
        return self._memory.load(at, mask, other, dtype)

    def store(self, at: np.ndarray, value: np.ndarray, mask: np.ndarray) -> None:
        self._check(at, mask, value.dtype.itemsize)
        self._memory.store(at, value, mask)

    def atomic_rmw(self, kind: object, at: np.ndarray, value: np.ndarray, mask: np.ndarray, order: object) -> object:
        self._check(at, mask, value.dtype.itemsize)
        return self._memory.atomic_rmw(kind, at, value, mask, order)

    def _check(self, at: np.ndarray, mask: np.ndarray, size: int) -> None:
        used = at[np.broadcast_to(mask, at.shape).astype(bool)].astype(np.uint64)
        index = np.searchsorted(self._ranges[:, 0], used, side="right") - 1
        inside = (index >= 0) & (used + np.uint64(size) <= self._ranges[index, 1])
        assert inside.all(), f"{self._kernel} uses {(~inside).sum()} addresses outside of its tensors"


def tensors_of(arguments: Iterable[object]) -> Iterator[torch.Tensor]:
    """Find the tensors of a launch, also in tuples and descriptors."""
    for each in arguments:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, tuple):
            yield from tensors_of(each)
        elif hasattr(each, "base"):
            yield each.base


def stay_in_bounds() -> None:
    """Hold every launch to the memory of its tensors."""
    bounds, copy = Bounds(interpreter._interpreter), interpreter.GridExecutor._init_args_hst

    def begin(self: interpreter.GridExecutor, args: object, options: object) -> tuple[list[object], dict[str, object]]:
        given, named = copy(self, args, options)
        bounds.begin(self.fn.__name__, (*given, *named.values()))
        return given, named

    interpreter._interpreter = bounds
    interpreter.GridExecutor._init_args_hst = begin


let_numbers_bound_loops()
launch_faster()
if not ON_GPU:
    describe_once()
add_in_one_order()
stay_in_bounds()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture(params=[torch.float32, *([torch.bfloat16] if ON_GPU else [])], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Types of activations and KV memory. The interpreter cannot multiply bf16."""
    assert isinstance(request.param, torch.dtype)
    return request.param
