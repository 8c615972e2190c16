"""Compile the C sources once for this machine, into the user's cache, and load the library.

The file name has a hash of sources, flags and compiler: a new version never loads an old library. Processes that
compile at the same time each write a temporary file and rename it into place. `-march=native` is never used: a library
is one of several variants, whose flags are written here.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from paceline.cache_home import cache_home
from paceline.errors import NoCompiler, UnknownOption
from paceline.kernels.cpu import abi
from paceline.kernels.cpu.abi_check import check_abi

logger = logging.getLogger(__name__)
SOURCES = Path(__file__).parent
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno")
LIBRARIES = ("-lm", "-lpthread")
AVX512 = ("-DPACELINE_AVX512", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mfma")
NEEDS_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx2", "fma", "f16c"}
AVX2 = ("-DPACELINE_AVX2", "-mavx2", "-mfma", "-mf16c")
NEEDS_AVX2 = {"avx2", "fma", "f16c"}
VARIANTS = {
    "avx512bf16": (*AVX512, "-mavx512bf16"),
    "avx512": AVX512,
    "avxvnni": (*AVX2, "-DPACELINE_AVXVNNI", "-mavxvnni"),
    "avx2": AVX2,
    "portable": (),
}
NEEDS = {
    "avx512bf16": NEEDS_AVX512 | {"avx512_bf16"},
    "avx512": NEEDS_AVX512,
    "avxvnni": NEEDS_AVX2 | {"avx_vnni"},
    "avx2": NEEDS_AVX2,
}
OLDER = {"avx512bf16": "avx512", "avxvnni": "avx2"}  # variant to use where the compiler is too old for one


@cache
def cpu_features() -> frozenset[str]:
    """Instruction sets of this CPU, as Linux spells them; empty on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def choose_variant() -> str:
    """Return the widest variant that this CPU runs, or the one that PACELINE_CPU_VARIANT names."""
    forced = os.environ.get("PACELINE_CPU_VARIANT")
    if forced is not None and forced not in VARIANTS:
        raise UnknownOption("PACELINE_CPU_VARIANT", forced, VARIANTS)
    if forced is not None:
        return forced
    return next((name for name, needs in NEEDS.items() if needs <= cpu_features()), "portable")


def compiler() -> list[str]:
    """Return the command of the C compiler: `$CC`, else the machine's cc, gcc or clang."""
    if command := shlex.split(os.environ.get("CC", "")):
        return command
    found = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if found is None:
        raise NoCompiler("no C compiler found (looked for $CC, cc, gcc, clang); install gcc or clang for the fast path")
    return [found]


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise NoCompiler(
            f"the C compiler {command[0]!r} cannot be run ({problem}); set $CC to one that works"
        ) from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        reason = next((line for line in lines if "error" in line), lines[0])
        raise NoCompiler(f"the C compiler {command[0]!r} failed ({reason}); set $CC to gcc or clang")
    return done.stdout


def _digest(command: list[str]) -> str:
    digest = hashlib.sha256(f"{command}{_run([command[0], '--version'])}{platform.machine()}".encode())
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:20]


def library_path(variant: str) -> Path:
    """Return the path of a variant's library, and compile it if it does not exist yet."""
    command = [*compiler(), *FLAGS, *VARIANTS[variant]]
    target = cache_home() / f"kernels-{variant}-{_digest(command)}.so"
    if target.exists():
        return target
    target = _writable(target.parent) / target.name
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        fresh = Path(folder) / target.name
        _run([*command, *map(str, sorted(SOURCES.glob("*.c"))), "-o", str(fresh), *LIBRARIES])
        os.replace(fresh, target)
    return target


def _writable(folder: Path) -> Path:
    """Return a folder for libraries: this one, or a temporary one for this process if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder):
            return folder
    except OSError as error:
        logger.warning("the compiled kernels are not cached, so every start takes longer: %s", error)
        temporary = tempfile.mkdtemp(prefix="paceline-")
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        return Path(temporary)


class Library(ctypes.CDLL):
    """The kernels of one variant, with the types of their functions; raises AbiMismatch if the mirror is wrong."""

    variant: str

    def __init__(self, variant: str) -> None:
        super().__init__(str(library_path(variant)))
        self.variant = variant
        for name, (result, arguments) in abi.FUNCTIONS.items():
            function = getattr(self, name)
            function.restype, function.argtypes = result, arguments
        check_abi(self)


@cache
def _load(variant: str) -> Library:
    return Library(variant)


def load_library() -> Library:
    """Load the kernels for this CPU, compiled on first use. Raises NoCompiler where that is impossible."""
    variant = choose_variant()
    try:
        return _load(variant)
    except NoCompiler:
        if variant not in OLDER:
            raise
        return _load(OLDER[variant])
