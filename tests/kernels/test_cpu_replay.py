"""Recorded passes give the same bits on every CPU: replayed here by each variant, and by qemu on CPUs that this is not.

`make test-arm` runs all of it. Without qemu and a cross-compiler, the emulated CPUs are skipped.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import pytest

from paceline.kernels.cpu import build
from paceline.kernels.cpu.abi import Epilogue, Format, OperationKind
from tests.kernels.recorded_passes import record_small_models, record_smollm2
from tests.kernels.recording import ALIGNMENT, RECORDED, Recording
from tests.kernels.tiny_forward import RUNNABLE

DRIVER = Path(__file__).with_name("replay.c")
THREADS = ("1", "2")
ENUMS: tuple[type[IntEnum], ...] = (OperationKind, Epilogue, Format)


@dataclass(frozen=True)
class Machine:
    """An emulated CPU. `sysroot`: the libraries of its system, where they are not those of this one."""

    emulator: str
    cpu: str
    compiler: str
    sysroot: str | None = None

    def __str__(self) -> str:
        return self.cpu

    def command(self) -> list[str]:
        return [self.emulator, "-cpu", self.cpu, *(["-L", self.sysroot] if self.sysroot else [])]


def arm(cpu: str) -> Machine:
    return Machine("qemu-aarch64", cpu, "aarch64-linux-gnu-gcc", "/usr/aarch64-linux-gnu")


OLD_X86 = Machine("qemu-x86_64", "Nehalem", "gcc")  # no AVX
EMULATED = [
    ("neon-dotprod", arm("max")),
    ("neon-dotprod", arm("neoverse-n1")),
    ("neon", arm("cortex-a72")),  # no sdot
    ("portable", arm("cortex-a72")),
    ("portable", OLD_X86),
]
BEYOND = [("neon-dotprod", arm("cortex-a72")), ("avx2", OLD_X86)]
Driver = Callable[..., list[str]]


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recording, Path]:
    recording, path = record_small_models(), tmp_path_factory.mktemp("replay") / "small_models"
    recording.write(path)
    return recording, path


@pytest.fixture(scope="session")
def steps_of_smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replay") / "smollm2"
    record_smollm2().write(path)
    return path


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Return a function that compiles the driver with the library of a variant, and returns its command."""

    def compiled(variant: str, machine: Machine | None = None) -> list[str]:
        if machine is not None:
            require(machine)
            monkeypatch.setenv("CC", machine.compiler)
        path = tmp_path / variant
        words = ["-std=gnu11", "-O1", "-Wall", "-Werror", f"-I{build.SOURCES}", str(DRIVER)]
        library = str(build.library_path(variant))
        subprocess.run([*build.compiler(), *words, library, "-o", str(path), *build.LIBRARIES], check=True)
        return [*(machine.command() if machine else ()), str(path)]

    return compiled


def require(machine: Machine) -> None:
    if machine.sysroot is None and platform.machine() != "x86_64":
        pytest.skip(reason="needs an x86-64 machine: its libraries are those of the emulated CPU")
    if missing := [tool for tool in (machine.emulator, machine.compiler) if shutil.which(tool) is None]:
        pytest.skip(reason=f"not installed: {', '.join(missing)}")


def replay(command: list[str], recording: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command, str(recording), *THREADS], capture_output=True, text=True)


def check(command: list[str], recording: Path) -> None:
    done = replay(command, recording)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all bits as recorded") == len(THREADS)


def test_every_function_operation_and_format_is_recorded(small_models: tuple[Recording, Path]) -> None:
    recording, _ = small_models
    assert set(recording.counts) == set(RECORDED)
    assert recording.used == {repr(each) for enum in ENUMS for each in enum}


@pytest.mark.parametrize("variant", RUNNABLE)
def test_every_variant_gives_the_recorded_bits(
    variant: str, small_models: tuple[Recording, Path], driver: Driver
) -> None:
    check(driver(variant), small_models[1])


def test_one_changed_bit_is_found(small_models: tuple[Recording, Path], driver: Driver, tmp_path: Path) -> None:
    image = bytearray(small_models[1].read_bytes())
    image[image.index(b"logits\0") + ALIGNMENT] ^= 1  # the recorded logits follow their name
    (tmp_path / "changed").write_bytes(image)
    done = replay(driver(RUNNABLE[0]), tmp_path / "changed")
    assert done.returncode == 1
    assert re.search(r"1 threads, call \d+ \(paceline_program_draw\): logits differs at byte 0: ", done.stderr)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # seconds; emulated on a busy machine
@pytest.mark.parametrize(("variant", "machine"), EMULATED, ids=str)
def test_emulated_cpus_give_the_recorded_bits(
    variant: str, machine: Machine, small_models: tuple[Recording, Path], driver: Driver
) -> None:
    check(driver(variant, machine), small_models[1])


@pytest.mark.slow
@pytest.mark.parametrize("variant", RUNNABLE)
def test_every_variant_gives_the_bits_of_smollm2(variant: str, steps_of_smollm2: Path, driver: Driver) -> None:
    check(driver(variant), steps_of_smollm2)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # seconds; emulated on a busy machine
@pytest.mark.parametrize(("variant", "machine"), [EMULATED[0], EMULATED[2]], ids=str)
def test_emulated_cpus_give_the_bits_of_smollm2(
    variant: str, machine: Machine, steps_of_smollm2: Path, driver: Driver
) -> None:
    check(driver(variant, machine), steps_of_smollm2)


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "machine"), BEYOND, ids=str)
def test_emulated_cpus_refuse_instructions_that_they_lack(
    variant: str, machine: Machine, small_models: tuple[Recording, Path], driver: Driver
) -> None:
    """So the other tests would find an illegal instruction."""
    done = replay(driver(variant, machine), small_models[1])
    assert "Illegal instruction" in done.stderr


# ── instructions ──


def registers_of(variant: str) -> set[str]:
    if shutil.which("objdump") is None or platform.machine() != "x86_64":
        pytest.skip(reason="needs objdump and an x86-64 machine")
    words = ["objdump", "-d", "--no-show-raw-insn", str(build.library_path(variant))]
    code = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"%([xyz]mm|k[0-7])", code)) | set(re.findall(r"\s(v)[a-z]+[0-9a-z]*\s", code))


def test_a_library_has_no_wider_registers_than_its_variant() -> None:
    """A register of AVX, or an instruction of its encoding (v…), would be illegal on older CPUs."""
    assert registers_of("portable") == {"xmm"}
    assert not registers_of("avx2") & {"zmm", *(f"k{i}" for i in range(8))}
