"""Sizes of memory as people write and read them: `512M` to bytes, bytes to `512.0 MiB`."""

from __future__ import annotations

import re

UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_size(text: str) -> int | None:
    """Read a number of bytes with an optional unit: 512M, 1.5GiB, 4096. None: `text` is no size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)(?:i?b)?", text.strip().lower())
    return int(float(match[1]) * UNITS[match[2]]) if match else None


def format_size(count: int) -> str:
    """Write a number of bytes in MiB, or from 1 GiB on in GiB."""
    return f"{count / 2**20:.1f} MiB" if count < 2**30 else f"{count / 2**30:.2f} GiB"
