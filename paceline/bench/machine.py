"""Facts about the machine, and its memory bandwidth, the limit of decode speed.

The bandwidth is that of a copy within device memory, reads and writes both counted. It is measured, not taken from a
data sheet, so a fraction of it can be slightly above 1 where reading is faster than copying.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import paceline

COPY_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}  # far more than caches hold
REPEATS, COPIES = 5, 4  # timings, of which the best counts, and copies per timing
COMMIT_VARIABLE = "PACELINE_COMMIT"  # environment variable, for a machine without git


def describe(device: torch.device) -> dict[str, Any]:
    facts = {
        "device": device.type,
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "paceline": paceline.__version__,
        "commit": os.environ.get(COMMIT_VARIABLE)
        or _output_of(["git", "describe", "--always", "--dirty"])
        or "unknown",
    }
    return facts | (_gpu(device) if device.type == "cuda" else {})


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, the best of a few copies."""
    size = COPY_BYTES[device.type]
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)  # touches every page once
    seconds = min(_seconds(lambda: target.copy_(source), device) for _ in range(REPEATS))
    return 2 * size * COPIES / seconds


def release(device: torch.device) -> None:
    """Return unused cached memory to the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Time several copies in a row, so that the latency between host and GPU hardly counts."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(COPIES):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _gpu(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    driver = _output_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return {
        "gpu": properties.name,
        "gpu_memory": properties.total_memory,
        "driver": (driver.splitlines() or ["unknown"])[0],
        "cuda": torch.version.cuda,
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _output_of(command: list[str]) -> str:
    """The output of a program; empty if it cannot be run."""
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
