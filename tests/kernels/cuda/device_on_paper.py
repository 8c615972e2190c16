"""A Hopper that computes nothing: kernels are specialised as for the machine, noted instead of compiled, and skipped.

Import this module first, in a process in which Triton's interpreter is off. Tensors are on the CPU and say that they
are not; torch's products, timings and random numbers do nothing. So the launches of a start and of traffic can be
compared on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from paceline.kernels.cuda import linear
from paceline.runner.rounds import cuda

Facts = dict[str, str]
MEMORY = 64 << 30  # bytes of the device that are free


class Driver:
    """Implements the part of Triton's driver that a launch asks."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Skipped:
    """A compiled kernel that is never launched."""

    function = packed_metadata = None

    def launch_metadata(self, *arguments: object) -> None:
        pass

    def run(self, *arguments: object) -> None:
        pass


class Noted:
    """The kernels that were asked for, by name, and the comparisons of products' ways."""

    def __init__(self) -> None:
        self.kernels: dict[str, list[Facts]] = {}
        self.comparisons = 0
        self.late: list[str] = []  # that were asked for after the start, each with what is new about it
        self.started = False

    def note(self, name: str, facts: Facts) -> None:
        if self.started:
            self.late.append(f"{name}: {self._difference(name, facts)}")
        self.kernels.setdefault(name, []).append(facts)

    def _difference(self, name: str, facts: Facts) -> str:
        """Describe how a kernel differs from the one that is most like it."""
        others = [{*known.items()} ^ {*facts.items()} for known in self.kernels.get(name, [])]
        return str(sorted(min(others, key=len))) if others else "the first of its name"


noted = Noted()
_functions: set[JITFunction] = set()
_capturing = False


def forget() -> None:
    """Begin anew, as in a new process."""
    noted.__init__()  # type: ignore[misc]
    for function in _functions:
        function.device_caches.clear()


def _note(
    self: JITFunction, key: str, signature: Any, device: int, constexprs: Any, options: Any, attrs: Any, warmup: bool
) -> Skipped:
    names = [parameter.name for parameter in self.params]
    facts = {f"type of {name}": str(kind) for name, kind in signature.items()}
    facts |= {names[path[0]]: str(value) for path, value in constexprs.items()}
    facts |= {f"alignment of {names[path[0]]}": str(value) for path, value in attrs.items()}
    facts |= {name: str(getattr(options, name)) for name in ("num_warps", "num_stages", "launch_pdl")}
    noted.note(self.fn.__qualname__, facts)
    _functions.add(self)
    kernel = self.device_caches[device][0][key] = Skipped()
    return kernel


class Recorder:
    """Implements `runner.rounds.recorder.Recorder`: its graphs do nothing."""

    def __init__(self, device: torch.device) -> None:
        pass

    def __call__(self, launch: Callable[[], None]) -> SimpleNamespace:
        with _capture():
            launch()
        return SimpleNamespace(replay=lambda: None)


@contextmanager
def _capture() -> Iterator[None]:
    global _capturing
    _capturing = True
    try:
        yield
    finally:
        _capturing = False


def _counted(tried: Callable[..., Any]) -> Callable[..., Any]:
    def count(*arguments: Any) -> Any:
        noted.comparisons += noted.started
        return tried(*arguments)

    return count


def _replace(owner: Any, **members: Any) -> None:
    for name, member in members.items():
        setattr(owner, name, member)


def _product(*factors: object, out: Any = None, **options: object) -> Any:
    return out


driver.set_active(Driver())
_replace(JITFunction, _do_compile=_note)
_replace(torch, mm=_product, bmm=_product, addmm=_product, equal=lambda one, other: True)
_replace(torch.Tensor, is_cuda=True, normal_=lambda self, **options: self)
_replace(torch.backends.cuda, preferred_blas_library=lambda *names: None)
_replace(
    torch.cuda,
    synchronize=lambda device=None: None,
    mem_get_info=lambda device=None: (MEMORY, 2 * MEMORY),
    get_device_capability=lambda device=None: (9, 0),
    get_device_properties=lambda device=None: SimpleNamespace(multi_processor_count=132, total_memory=2 * MEMORY),
    is_current_stream_capturing=lambda: _capturing,
)
_replace(linear, seconds_of=lambda run, device: 1.0)
_replace(linear.Products, _tried=_counted(linear.Products._tried))
_replace(cuda, Recorder=Recorder)
