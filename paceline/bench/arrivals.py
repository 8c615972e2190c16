"""When requests are sent: so many at once, or at a rate that may grow, evenly or as a Poisson process.

The seconds between two requests depend on the load and a seed alone, never on how the server does.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Arrivals = Literal["poisson", "constant"]


@dataclass(frozen=True, slots=True)
class Load:
    """How hard a server is pressed."""

    at_once: int | None = None  # requests that are open at a time; None: any number
    rate: float | None = None  # requests a second; None: as soon as there is room
    last_rate: float | None = None  # a ramp ends here; None: the rate stays

    @property
    def title(self) -> str:
        ramp = "" if self.last_rate is None else f"–{self.last_rate:g}"
        rate = "" if self.rate is None else f"{self.rate:g}{ramp} requests/s"
        return " · ".join(part for part in (rate, f"c{self.at_once}" if self.at_once else "") if part)


def times(load: Load, *, count: int, arrivals: Arrivals, seed: int) -> Iterator[float]:
    """Seconds from the beginning at which each request is due."""
    rng, now = random.Random(seed), 0.0
    for i in range(count):
        yield now
        rate = _rate(load, place=i / max(count - 1, 1))
        if rate is not None:
            now += 1 / rate if arrivals == "constant" else rng.expovariate(rate)


def _rate(load: Load, *, place: float) -> float | None:
    """At a place from 0, the first request, to 1, the last."""
    if load.rate is None or load.last_rate is None:
        return load.rate
    return load.rate + place * (load.last_rate - load.rate)
