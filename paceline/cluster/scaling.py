"""How many replicas a load needs: by waiting sequences and KV pages, not by requests.

A replica is added where sequences wait or pages run out, and taken away where the others have room for its share. Ray
keeps to the limits and the delays of the configuration around this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TARGET_BUSY = 0.7  # share of places in the batch that may be taken after a replica has been taken away


@dataclass(frozen=True, slots=True)
class Load:
    """The load of one replica, as its statistics report it."""

    running: float
    waiting: float
    kv_usage: float
    places: float  # sequences that run at once


class Policy:
    """A policy for Ray's autoscaler."""

    def __init__(self, target_waiting: float, target_kv_usage: float) -> None:
        self.target_waiting, self.target_kv_usage = target_waiting, target_kv_usage

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        return self.wanted(loads(context.aggregated_metrics), now=context.target_num_replicas), {}

    def wanted(self, loads: list[Load], *, now: int) -> int:
        """Say how many replicas there should be. `now`: how many are asked for now; not all may have reported."""
        if not loads:
            return now
        sequences = sum(load.running + load.waiting for load in loads)
        places = sum(load.places for load in loads) / len(loads)
        needed = max(
            1,
            math.ceil(sequences / (TARGET_BUSY * places)),
            math.ceil(sum(load.kv_usage for load in loads) / self.target_kv_usage),
        )
        return max(now, needed) if self._strained(loads) else min(now, needed)

    def _strained(self, loads: list[Load]) -> bool:
        waiting = sum(load.waiting for load in loads) / len(loads)
        return waiting >= self.target_waiting or any(load.kv_usage >= self.target_kv_usage for load in loads)


def loads(metrics: Mapping[str, Mapping[Any, float]] | None) -> list[Load]:
    """Collect the loads of replicas that have reported all of theirs."""
    found = metrics or {}
    parts = [found.get(name, {}) for name in Load.__slots__]
    names = set.intersection(*(set(part) for part in parts))
    return [Load(*(part[name] for part in parts)) for name in names]
