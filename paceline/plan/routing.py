"""Routing of simulated requests: which replica takes each, and the router in front of them.

    random         any replica
    least-waiting  the one with the fewest requests that have not ended; the router knows them, as answers pass it
    prefix         the home of the prompt's prefix, unless it has more than BOUND times the mean; then least-waiting

The router itself serves one request after the other, each in the same time: a queue of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np

from paceline.plan.workload import Requests

Routing = Literal["random", "least-waiting", "prefix"]
ROUTINGS: tuple[str, ...] = get_args(Routing)
# Load of a replica by the mean of all, at which prompts go elsewhere: consistent hashing with bounded loads (Mirrokni,
# Thorup and Zadimoghaddam 2018), with the value that its authors' blog names.
BOUND = 1.25

Open = np.ndarray[Any, np.dtype[np.int64]]  # requests that have not ended, by replica
Choose = Callable[[int], int]  # request → replica


def routed(due: Sequence[float], rate: float | None) -> list[float]:
    """Return when each request leaves a router that takes `rate` requests a second; None: at once."""
    if rate is None:
        return list(due)
    each = np.arange(len(due)) / rate
    arrivals = np.asarray(due, dtype=np.float64)
    left: list[float] = (np.maximum.accumulate(arrivals - each) + each + 1 / rate).tolist()
    return left


def chooser(routing: str, requests: Requests, open: Open, *, seed: int) -> Choose:
    """Make the function that chooses a replica. `open` is read at every call."""
    random, count = np.random.default_rng(seed), len(open)
    if routing == "random":
        drawn: list[int] = random.integers(0, count, len(requests.due)).tolist()
        return drawn.__getitem__
    if routing == "least-waiting":
        return lambda request: int(open.argmin())
    assert routing == "prefix", f"no routing {routing!r}"
    homes: list[int] = random.integers(0, count, max(requests.prefixes, default=-1) + 1).tolist()

    def by_prefix(request: int) -> int:
        prefix = requests.prefixes[request]
        if prefix >= 0 and open[homes[prefix]] <= BOUND * (open.sum() + 1) / count:
            return homes[prefix]
        return int(open.argmin())

    return by_prefix
