"""The cores of this machine that a process may use, as Linux describes them in files.

Reading is separate from choosing, and all paths are under one root, so that tests make up machines. Elsewhere than on
Linux every CPU counts as a core of one kind.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from paceline.kernels.cpu.cgroups import cpu_quota, text_of

ROOT = Path("/")
CPU_FOLDER = "sys/devices/system/cpu"
EFFICIENCY_SPEED = 0.75  # of the fastest core's: a slower core is for efficiency; bins of one kind differ by less


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core, and the CPUs on it that the process may use."""

    cpus: tuple[int, ...]  # hyperthreads
    node: int  # NUMA node
    efficient: bool  # slower than the performance cores


@dataclass(frozen=True, slots=True)
class Machine:
    """Cores that a process may use, the fastest kind first, then by NUMA node."""

    cores: tuple[Core, ...]
    quota: float | None = None  # CPUs that the cgroups of the process may use on average; None: all

    @property
    def performance(self) -> tuple[Core, ...]:
        return tuple(core for core in self.cores if not core.efficient)

    @property
    def nodes(self) -> int:
        return len({core.node for core in self.cores})


def read_machine(root: Path = ROOT, *, allowed: Collection[int] | None = None) -> Machine:
    """Read the cores under `root`. `allowed`: CPUs of the process; None: those of its affinity mask."""
    cpus = sorted(_allowed() if allowed is None else allowed)
    folder = root / CPU_FOLDER
    slow, nodes = _efficiency_cpus(root, cpus), _nodes(root)
    siblings: dict[tuple[int, ...], list[int]] = {}
    for cpu in cpus:
        together = _list(folder / f"cpu{cpu}/topology/thread_siblings_list") or [cpu]
        siblings.setdefault(tuple(together), []).append(cpu)
    cores = [Core(tuple(own), nodes.get(own[0], 0), own[0] in slow) for own in siblings.values()]
    return Machine(tuple(sorted(cores, key=lambda core: (core.efficient, core.node, core.cpus))), cpu_quota(root))


def _allowed() -> Collection[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def _efficiency_cpus(root: Path, cpus: Collection[int]) -> set[int]:
    """Find the CPUs that are slow beside others: by Intel's list of them, else by the capacities of ARM, else by the
    highest clock rates."""
    if listed := set(_list(root / "sys/devices/cpu_atom/cpus")):
        return listed if set(cpus) - listed else set()
    folder = root / CPU_FOLDER
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        speeds = {cpu: _number(folder / f"cpu{cpu}" / name) for cpu in cpus}
        fastest = max(speeds.values(), default=0)
        if slow := {cpu for cpu, speed in speeds.items() if 0 < speed < EFFICIENCY_SPEED * fastest}:
            return slow
    return set()


def _nodes(root: Path) -> dict[int, int]:
    """Map each CPU to its NUMA node; empty where Linux does not tell."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    return {cpu: int(folder.name[4:]) for folder in folders for cpu in _list(folder / "cpulist")}


def _number(path: Path) -> int:
    text = text_of(path).strip()
    return int(text) if text.isdecimal() else 0


def _list(path: Path) -> list[int]:
    """Read a list of CPUs such as `0-3,8`."""
    cpus: list[int] = []
    for part in text_of(path).strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last.isdecimal() or not last):
            cpus.extend(range(int(first), int(last or first) + 1))
    return cpus
