"""The directory under which Paceline keeps files that it can fetch or make again: models and packed weights."""

from __future__ import annotations

import os
from pathlib import Path


def cache_home() -> Path:
    """Return PACELINE_CACHE if set, else `paceline` under XDG_CACHE_HOME or ~/.cache. It may not exist yet."""
    own = os.environ.get("PACELINE_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"
