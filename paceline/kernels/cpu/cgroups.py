"""The cgroups of this process: folders of files in which Linux says what a container may use.

A process has the least that its own cgroup and all those above it allow. All paths are under a root, so that tests make
up machines. Elsewhere than on Linux there are none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders that limit this process, each with those above it. `controller`: cpu or memory.

    Version 2 has one tree for all controllers, version 1 one for each. A container may see its own cgroup as the top,
    under a path that does not name it."""
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, path = ([*line.split(":", 2), "", ""])[:3]
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            yield mount.joinpath(*parts[:depth])


def cpu_quota(root: Path) -> float | None:
    """Return the least number of CPUs that a cgroup of this process, or one above it, may use on average."""
    return min((quota for folder in cgroups(root, "cpu") if (quota := _quota(folder)) is not None), default=None)


def _quota(folder: Path) -> float | None:
    """Return the CPUs of one cgroup: of version 2 in one file, of version 1 in two."""
    words = text_of(folder / "cpu.max").split()
    words = words or [*text_of(folder / "cpu.cfs_quota_us").split(), *text_of(folder / "cpu.cfs_period_us").split()]
    if len(words) != 2 or not all(word.isdecimal() for word in words) or int(words[1]) == 0:
        return None  # no limit: "max", or -1
    return int(words[0]) / int(words[1])


def memory_left(root: Path) -> int | None:
    """Return the fewest bytes that a cgroup of this process, or one above it, may still use; None: no limit."""
    return min((left for folder in cgroups(root, "memory") if (left := _left(folder)) is not None), default=None)


def _left(folder: Path) -> int | None:
    """Return the bytes that are left to one cgroup. Pages of files count as free: the system drops them when needed."""
    for limit, usage, prefix in (  # version 2, version 1
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        most, used = text_of(folder / limit).strip(), text_of(folder / usage).strip()
        if most.isdecimal() and used.isdecimal():
            pairs = (line.split() for line in text_of(folder / "memory.stat").splitlines())
            stat = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
            files = sum(stat.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
            return max(0, int(most) - max(0, int(used) - files))
    return None


def text_of(path: Path) -> str:
    """Return a file's text; nothing if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
