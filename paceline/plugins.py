"""Plug-ins: drafters and acceptance rules of other installed packages, found by their entry points.

A package offers them in the groups `paceline.drafters` and `paceline.rules`. A plug-in is loaded when its name is asked
for, or when a list of names is wanted with what they are. One that cannot be loaded is named in a warning and skipped:
it never keeps Paceline from starting.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

logger = logging.getLogger(__name__)
DRAFTERS, RULES = "paceline.drafters", "paceline.rules"


def names(group: str) -> list[str]:
    """Names that installed packages offer in a group, sorted; nothing is loaded for this."""
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
        logger.warning("the plug-in %s (%s) cannot be loaded and is skipped: %r", name, point.value, error)
        return None


def _found(group: str) -> dict[str, EntryPoint]:
    """Entry points by name; where two packages offer the same name the first one counts, which is logged."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        if point.name in found:
            logger.warning("two plug-ins are named %s: %s is used, %s is not", point.name, found[point.name], point)
        else:
            found[point.name] = point
    return found
