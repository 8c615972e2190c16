"""Routing of simulated requests: which replica takes each, and the router in front of them.

    random         any replica
    least-waiting  as Paceline's router chooses for a request that names nothing: the least busy one of a few drawn
    prefix         as it chooses by the beginning of a prompt

The last two are the choices of `cluster.affinity` itself. A replica is as busy as the number of requests that it has
and that have not ended; the router knows them, as answers pass it. The router itself serves one request after the
other, each in the same time: a queue of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Literal, get_args

import numpy as np

from paceline.cluster.affinity import NO_WISH, Affinity, Wish
from paceline.plan.workload import Requests

Routing = Literal["random", "least-waiting", "prefix"]
ROUTINGS: tuple[str, ...] = get_args(Routing)

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
    count = len(open)
    if routing == "random":
        drawn: list[int] = np.random.default_rng(seed).integers(0, count, len(requests.due)).tolist()
        return drawn.__getitem__
    assert routing in ROUTINGS, f"no routing {routing!r}"
    numbers = {f"replica {number}": number for number in range(count)}
    router = Affinity(random=Random(seed))
    router.keep(numbers)
    wishes = _wishes(requests) if routing == "prefix" else {}

    def busy(name: str) -> int:
        return int(open[numbers[name]])

    def by_router(request: int) -> int:
        wish = wishes.get(requests.prefixes[request], NO_WISH)
        name = min(router.ranks(wish, busy)[0], key=busy)  # replicas of a plan always take one more
        router.routed(wish, name)
        return numbers[name]

    return by_router


def _wishes(requests: Requests) -> dict[int, Wish]:
    """Make the wish of each prefix. A prompt without one wishes for nothing."""
    return {prefix: Wish(beginnings=(f"prefix {prefix}",)) for prefix in {*requests.prefixes} if prefix >= 0}
