"""Plug-ins: drafters and acceptance rules of other installed packages, found by their entry points.

A package offers them in the groups `paceline.drafters` and `paceline.rules`. A plug-in is loaded when its name is asked
for, or when a list of usable names is wanted. One that cannot be loaded is named in a warning and skipped: it keeps
Paceline from starting only where a user asks for it by name.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

logger = logging.getLogger(__name__)
DRAFTERS, RULES = "paceline.drafters", "paceline.rules"


def names(group: str) -> list[str]:
    """List the names that installed packages offer in a group, sorted, without loading a plug-in."""
    return sorted(_found(group))


@cache
def load(group: str, name: str) -> Any | None:
    """Import the plug-in `name` of a group. None: there is none, or it cannot be loaded, which is logged once."""
    point = _found(group).get(name)
    if point is None:
        return None
    try:
        return point.load()
    except Exception as error:  # another package's code, at import
        logger.warning("the plug-in %s cannot be loaded and is skipped: %s", name, _why(point, error))
        return None


def problem(group: str, name: str) -> str | None:
    """Say where the plug-in `name` comes from and why it cannot be loaded. None: it can be, or there is none."""
    point = _found(group).get(name)
    if point is None:
        return None
    try:
        point.load()
    except Exception as error:  # `load` has only logged this error of the package
        return _why(point, error)
    return None


def _why(point: EntryPoint, error: Exception) -> str:
    return f"{point.value} raised {type(error).__name__}: {error}"


def _found(group: str) -> dict[str, EntryPoint]:
    """Map names to entry points. If two packages offer one name, the first counts, and a warning is logged."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        if point.name in found:
            logger.warning("two plug-ins are named %s: %s is used, %s is not", point.name, found[point.name], point)
        else:
            found[point.name] = point
    return found
