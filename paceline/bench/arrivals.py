"""The load on a server, and the times at which its requests are sent: at a concurrency, or at a rate that may grow.

The times depend on the load and a seed alone, never on how fast the server answers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Arrivals = Literal["poisson", "constant"]


@dataclass(frozen=True, slots=True)
class Load:
    at_once: int | None = None  # requests that are open at a time; None: any number
    rate: float | None = None  # requests per second; None: as soon as `at_once` allows
    last_rate: float | None = None  # rate at the end of a ramp; None: the rate stays

    @property
    def title(self) -> str:
        ramp = "" if self.last_rate is None else f"–{self.last_rate:g}"
        rate = "" if self.rate is None else f"{self.rate:g}{ramp} requests/s"
        return " · ".join(part for part in (rate, f"c{self.at_once}" if self.at_once else "") if part)


def times(load: Load, *, count: int, arrivals: Arrivals, seed: int) -> Iterator[float]:
    """Yield the time at which each request is due, in seconds from the start."""
    rng, now = random.Random(seed), 0.0
    for i in range(count):
        yield now
        rate = _rate(load, place=i / max(count - 1, 1))
        if rate is not None:
            now += 1 / rate if arrivals == "constant" else rng.expovariate(rate)


def _rate(load: Load, *, place: float) -> float | None:
    """Compute the requests per second at `place`, which goes from 0, the first request, to 1, the last."""
    if load.rate is None or load.last_rate is None:
        return load.rate
    return load.rate + place * (load.last_rate - load.rate)
