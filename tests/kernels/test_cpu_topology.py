"""Cores of made-up machines, the threads that are chosen for them, and the weights that each thread touches."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from paceline.kernels.cpu.cgroups import cpu_quota, memory_left
from paceline.kernels.cpu.first_touch import part, touch_by_node
from paceline.kernels.cpu.memory import Region
from paceline.kernels.cpu.pool import candidate_threads, default_threads, seats
from paceline.kernels.cpu.topology import Core, Machine, read_machine


def made_up(
    root: Path,
    cores: Sequence[Sequence[int]],
    *,
    nodes: Sequence[str] = (),
    atom: str | None = None,
    capacity: Mapping[int, int] | None = None,
    clock: Mapping[int, int] | None = None,
) -> Path:
    """Write the files of a machine: cores as lists of hyperthreads, nodes as lists of CPUs."""
    files: dict[str, str] = {f"sys/devices/system/node/node{i}/cpulist": text for i, text in enumerate(nodes)}
    for cpus in cores:
        for cpu in cpus:
            folder = f"sys/devices/system/cpu/cpu{cpu}"
            files[f"{folder}/topology/thread_siblings_list"] = ",".join(map(str, cpus))
            if capacity:
                files[f"{folder}/cpu_capacity"] = str(capacity[cpu])
            if clock:
                files[f"{folder}/cpufreq/cpuinfo_max_freq"] = str(clock[cpu])
    if atom is not None:
        files["sys/devices/cpu_atom/cpus"] = atom
    return written(root, {name: text + "\n" for name, text in files.items()})


def written(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def laptop(root: Path) -> Machine:
    """Six performance cores with hyperthreads, CPUs 0 … 11, and eight efficiency cores, 12 … 19."""
    cores = [[2 * i, 2 * i + 1] for i in range(6)] + [[cpu] for cpu in range(12, 20)]
    return read_machine(made_up(root, cores, nodes=["0-19"], atom="12-19"), allowed=range(20))


def server(root: Path) -> Machine:
    """Two sockets of 32 cores with hyperthreads: core i has CPUs i and i + 64."""
    cores = [[i, i + 64] for i in range(64)]
    return read_machine(made_up(root, cores, nodes=["0-31,64-95", "32-63,96-127"]), allowed=range(128))


def test_a_laptop_with_two_kinds_of_cores(tmp_path: Path) -> None:
    machine = laptop(tmp_path)
    assert len(machine.cores) == 14
    assert len(machine.performance) == 6
    assert machine.cores[0] == Core((0, 1), node=0, efficient=False)
    assert machine.cores[-1] == Core((19,), node=0, efficient=True)
    assert default_threads(machine) == 6, "one a performance core"
    assert candidate_threads(machine) == [6, 14, 3, 1]
    assert seats(machine, 6) == tuple((2 * i, 2 * i + 1) for i in range(6)), "each its own core"
    assert seats(machine, 3) == (tuple(range(12)),) * 3, "any performance core"
    assert seats(machine, 14)[6:] == tuple((cpu,) for cpu in range(12, 20))
    assert seats(machine, 15) == ((),) * 15, "more threads than cores run anywhere"


def test_a_server_with_two_sockets(tmp_path: Path) -> None:
    machine = server(tmp_path)
    assert len(machine.cores) == 64
    assert machine.nodes == 2
    assert candidate_threads(machine) == [64, 32, 16, 8, 4]
    assert [core.node for core in machine.cores] == [0] * 32 + [1] * 32, "neighbouring threads are on one node"
    assert seats(machine, 64)[40] == (40, 104)
    assert seats(machine, 32)[31] == (31, 95), "one node, each thread its own core"
    assert seats(machine, 16) == (tuple(cpu for i in range(32) for cpu in (i, i + 64)),) * 16, "anywhere on one node"


def test_a_virtual_machine_with_two_of_four_cpus_allowed(tmp_path: Path) -> None:
    machine = read_machine(made_up(tmp_path, [[0], [1], [2], [3]], nodes=["0-3"]), allowed={1, 3})
    assert [core.cpus for core in machine.cores] == [(1,), (3,)]
    assert candidate_threads(machine) == [2, 1]
    assert seats(machine, 2) == ((1,), (3,))
    assert seats(machine, 1) == ((),)


def test_half_of_a_core_allowed(tmp_path: Path) -> None:
    """Hyperthreads of one core count once, and a core with one allowed hyperthread counts."""
    machine = read_machine(made_up(tmp_path, [[0, 2], [1, 3]]), allowed={0, 2, 3})
    assert [core.cpus for core in machine.cores] == [(0, 2), (3,)]


@pytest.mark.parametrize("file", ["capacity", "clock"])
def test_big_and_little_cores_of_an_arm_chip(tmp_path: Path, file: str) -> None:
    """CPUs 0 … 3 are little, 4 … 6 big, and 7 is bigger by less than a kind."""
    speeds = {cpu: 446 if cpu < 4 else 871 if cpu < 7 else 1024 for cpu in range(8)}
    given = {"capacity": speeds} if file == "capacity" else {"clock": speeds}
    machine = read_machine(made_up(tmp_path, [[cpu] for cpu in range(8)], nodes=["0-7"], **given), allowed=range(8))
    assert [core.cpus[0] for core in machine.cores] == [4, 5, 6, 7, 0, 1, 2, 3]
    assert default_threads(machine) == 4
    assert candidate_threads(machine) == [4, 8, 2, 1]


def test_a_system_without_these_files(tmp_path: Path) -> None:
    machine = read_machine(tmp_path, allowed=range(4))
    assert machine == Machine(tuple(Core((cpu,), 0, False) for cpu in range(4)))


def test_only_efficiency_cores_allowed(tmp_path: Path) -> None:
    """A process that may use slow cores alone uses them all."""
    root = made_up(tmp_path, [[cpu] for cpu in range(4)], atom="2-3")
    assert default_threads(read_machine(root, allowed={2, 3})) == 2


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "250000 100000"}, 2.5),
        (
            {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/cpu.max": "250000 100000",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000",
            },
            2.5,
        ),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/x\n3:memory:/x",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            None,
        ),
        ({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/cpu.max": "damaged"}, None),
        ({}, None),
    ],
)
def test_the_quota_of_a_cgroup(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert cpu_quota(written(tmp_path, files)) == quota


GIB = 1 << 30


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/memory.max": "max"}, None),
        (  # the one above is the tighter: half of its 4 GiB is used, of which 1 GiB is pages of files
            {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/a/memory.current": f"{2 * GIB}\n",
                "sys/fs/cgroup/a/memory.stat": f"anon {GIB}\nactive_file {GIB // 4}\ninactive_file {3 * GIB // 4}\n",
                "sys/fs/cgroup/a/b/memory.max": str(8 * GIB),
                "sys/fs/cgroup/a/b/memory.current": str(2 * GIB),
            },
            3 * GIB,
        ),
        (  # a container that sees its own cgroup as the top
            {
                "proc/self/cgroup": "0::/",
                "sys/fs/cgroup/memory.max": str(2 * GIB),
                "sys/fs/cgroup/memory.current": str(GIB // 2),
            },
            3 * GIB // 2,
        ),
        (  # version 1, in a container that is not told where the top is
            {
                "proc/self/cgroup": "5:memory:/docker/x\n4:cpu,cpuacct:/docker/x",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
                "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
                "sys/fs/cgroup/memory/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB // 2}\n",
                "sys/fs/cgroup/cpu/memory.limit_in_bytes": "1",
                "sys/fs/cgroup/cpu/memory.usage_in_bytes": "1",
            },
            3 * GIB // 2,
        ),
        (
            {
                "proc/self/cgroup": "0::/a",
                "sys/fs/cgroup/a/memory.max": str(GIB),
                "sys/fs/cgroup/a/memory.current": str(2 * GIB),
            },
            0,
        ),
        ({"proc/self/cgroup": "0::/a", "sys/fs/cgroup/a/memory.max": str(GIB)}, None),
        ({}, None),
    ],
)
def test_the_memory_that_cgroups_leave(tmp_path: Path, files: dict[str, str], left: int | None) -> None:
    assert memory_left(written(tmp_path, files)) == left


def test_a_quota_limits_the_threads() -> None:
    machine = Machine(tuple(Core((cpu,), 0, False) for cpu in range(8)), quota=2.5)
    assert default_threads(machine) == 2
    assert candidate_threads(machine) == [2, 1]
    assert seats(machine, 2) == ((), ()), "any of eight CPUs"
    assert default_threads(Machine(machine.cores, quota=0.5)) == 1


def test_parts_of_matrices_cover_them_once() -> None:
    matrices = [(0, 7, 100), (1000, 64, 32), (4000, 1, 10)]
    for threads in (1, 2, 3, 8):
        bytes_of = [list(part(matrices, member, threads)) for member in range(threads)]
        for index, (offset, tiles, size) in enumerate(matrices):
            spans = [spans[index] for spans in bytes_of]
            assert spans[0][0] == offset
            assert spans[-1][1] == offset + tiles * size
            assert all(one[1] == next_[0] for one, next_ in itertools.pairwise(spans))


def test_memory_of_two_nodes_is_touched_on_both() -> None:
    memory = Region(1 << 20, what="a test")
    np.frombuffer(memory.view(), dtype=np.uint8)[:] = 1
    cores = (Core((0,), 0, False), Core((1,), 1, False))
    assert touch_by_node(memory, [(0, 16, 1 << 16)], Machine(cores[:1] * 2), 2) == 1
    assert np.frombuffer(memory.view(), dtype=np.uint8).all(), "one node: nothing is done"
    assert touch_by_node(memory, [(0, 16, 1 << 16)], Machine(cores), 2) == 2
    assert not np.frombuffer(memory.view(), dtype=np.uint8)[:: 1 << 12].any()


def test_this_machine() -> None:
    machine = read_machine()
    assert 1 <= default_threads() <= len(machine.cores)
    assert sum(len(core.cpus) for core in machine.cores) >= len(machine.cores)
