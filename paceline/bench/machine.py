"""What a number was measured on, and the number that decoding is measured against: bytes that memory moves a second.

The bandwidth is that of a copy from device memory to device memory, read and write both counted. It is measured, not
taken from a data sheet, so a fraction of it can come out slightly above 1 where reading is faster than copying.
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

COPY_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}  # far more than any cache holds
REPEATS, COPIES = 5, 4  # the best of so many times so many
COMMIT = "PACELINE_COMMIT"  # says it where there is no git


def describe(device: torch.device) -> dict[str, Any]:
    facts = {
        "device": device.type,
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "paceline": paceline.__version__,
        "commit": os.environ.get(COMMIT) or _said(["git", "describe", "--always", "--dirty"]) or "unknown",
    }
    return facts | (_gpu(device) if device.type == "cuda" else {})


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, the best of a few copies."""
    size = COPY_BYTES[device.type]
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)  # touches every page once
    seconds = min(_seconds(lambda: target.copy_(source), device) for _ in range(REPEATS))
    return 2 * size * COPIES / seconds


def release(device: torch.device) -> None:
    """Hand back what nobody holds any more."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of several in a row: the host's way to a GPU and back must not count."""
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
    driver = _said(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
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


def _said(command: list[str]) -> str:
    """What a program prints, or nothing where it cannot be run."""
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
