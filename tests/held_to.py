"""Run the tests as on an older CPU: `python -m tests.held_to avx2 [words for pytest]`.

Paceline's kernels and the libraries below the tests (torch, oneDNN, MKL, OpenBLAS, NumPy) each choose their code by the
CPU. This holds all of them to an older one, checks that torch, OpenBLAS and NumPy obey, and starts pytest. Two kinds:
`avx2`, as an AMD Zen 3; `portable`, the least that these libraries have for an x86-64 CPU.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

HELD = {
    "avx2": {
        "PACELINE_CPU_VARIANT": "avx2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell",
    },
    "portable": {
        "PACELINE_CPU_VARIANT": "portable",
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "OPENBLAS_CORETYPE": "Nehalem",
    },
}
HIDDEN = "NPY_DISABLE_CPU_FEATURES"


def main() -> None:
    kind, *words = sys.argv[1:] or [""]
    if kind not in HELD:
        sys.exit(f"hold the tests to one of {', '.join(HELD)}, not {kind!r}")
    if HIDDEN not in os.environ or dict(os.environ) != os.environ | HELD[kind]:
        held = HELD[kind] | {HIDDEN: " ".join(hidden_from_numpy(kind))}
        restart(["-m", "tests.held_to", kind, *words], held)  # libraries read them when they are loaded
    print(f"held to {kind}: {checked(kind)}", flush=True)
    restart(["-m", "pytest", *words], {})


def restart(words: list[str], more: dict[str, str]) -> None:
    os.execve(sys.executable, [sys.executable, *words], os.environ | more)


def hidden_from_numpy(kind: str) -> list[str]:
    """Names of what NumPy would use on this CPU and not on the older one. It warns of any other name."""
    used = [name for name, there in numpy_features().items() if there]
    return [name for name in used if kind == "portable" or name.startswith(("AVX512", "X86_V4"))]


def numpy_features() -> dict[str, bool]:
    """Each kind of CPU that NumPy has code of its own for, and whether this is one."""
    from numpy._core import _multiarray_umath as numpy_core

    return {name: numpy_core.__cpu_features__[name] for name in numpy_core.__cpu_dispatch__}


def checked(kind: str) -> str:
    import torch

    capability, core, left = torch.backends.cpu.get_cpu_capability(), openblas_core(), hidden_from_numpy(kind)
    torch_obeys = capability.lower() == HELD[kind]["ATEN_CPU_CAPABILITY"]
    openblas_obeys = core in (None, HELD[kind]["OPENBLAS_CORETYPE"])
    if not torch_obeys or not openblas_obeys or left:
        sys.exit(f"not held to {kind}: torch has {capability}, OpenBLAS {core}, NumPy {left or 'nothing more'}")
    return f"torch {capability}, OpenBLAS {core or 'not there'}, NumPy without {os.environ[HIDDEN]}"


def openblas_core() -> str | None:
    """The CPU that NumPy's OpenBLAS takes this one for; None where NumPy has another BLAS."""
    import numpy

    found = [*Path(numpy.__file__).parents[1].glob("numpy.libs/libscipy_openblas64_*.so")]
    if not found:
        return None
    name = ctypes.CDLL(str(found[0])).scipy_openblas_get_corename64_
    name.restype = ctypes.c_char_p
    told = name()
    assert isinstance(told, bytes)
    return told.decode()


if __name__ == "__main__":
    main()
