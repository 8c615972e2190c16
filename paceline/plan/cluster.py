"""A simulated cluster: requests that arrive, a router, and replicas, on simulated time.

Events are arrivals behind the router and ends of groups of steps (`plan.replica`). The simulation goes on until the
last request has ended, so that every request ends once. The same seed gives the same figures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from paceline.plan.replica import Replica
from paceline.plan.routing import chooser, routed
from paceline.plan.service import Service
from paceline.plan.workload import Requests

NEVER = float("inf")
TICK = 4096  # requests between two calls of `tick`


@dataclass(frozen=True, slots=True)
class Outcome:
    """Times of all requests, in seconds, and what the replicas did."""

    requests: Requests
    left: list[float]  # when each request left the router
    first: list[float]  # first token
    finish: list[float]  # last token
    busy: list[float]  # seconds, of each replica
    open_seconds: float  # requests behind the router that have not ended, summed over time
    hits: int  # prompts whose prefix a replica had

    @property
    def seconds(self) -> float:
        """Time until the last token."""
        return max(self.finish)


def simulate(
    service: Service,
    requests: Requests,
    *,
    replicas: int,
    routing: str,
    router_rate: float | None = None,
    seed: int = 0,
    tick: Callable[[int], None] = lambda done: None,
) -> Outcome:
    """Run all requests. `tick` is called now and then with the number of requests that have left the router."""
    count = len(requests.due)
    first, finish = [NEVER] * count, [NEVER] * count
    left = routed(requests.due, router_rate)
    fleet = [Replica(service, requests, first, finish) for _ in range(replicas)]
    open = np.zeros(replicas, dtype=np.int64)
    choose = chooser(routing, requests, open, seed=seed)
    clock = _Clock(fleet, open)
    for request, now in enumerate(left):
        clock.run(now)
        chosen = choose(request)
        open[chosen] += 1
        clock.count(now, 1)
        fleet[chosen].arrive(request, now)
        clock.expect(chosen)
        if not request % TICK:
            tick(request)
    clock.run(NEVER)
    assert not open.any(), "a request did not end, or ended twice"
    busy = [replica.busy for replica in fleet]
    return Outcome(requests, left, first, finish, busy, clock.open_seconds, sum(replica.hits for replica in fleet))


class _Clock:
    """Ends groups of steps in the order of time."""

    def __init__(self, fleet: list[Replica], open: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        self._fleet = fleet
        self._open = open
        self._events: list[tuple[float, int, int]] = []  # heap: end of a group, replica, its version
        self._expected = [-1] * len(fleet)  # version of the latest event of each replica
        self._total = 0  # requests that have not ended
        self._now = 0.0
        self.open_seconds = 0.0

    def run(self, until: float) -> None:
        """End all groups that end by then."""
        events, fleet = self._events, self._fleet
        while events and events[0][0] <= until:
            now, number, version = heappop(events)
            replica = fleet[number]
            if replica.version != version:
                continue
            ended = replica.end_group()
            if ended:
                self._open[number] -= ended
                self.count(now, -ended)
            self.expect(number)

    def expect(self, number: int) -> None:
        """Note the end of the group that a replica runs, if it is not noted."""
        replica = self._fleet[number]
        if replica.ends is not None and self._expected[number] != replica.version:
            self._expected[number] = replica.version
            heappush(self._events, (replica.ends, number, replica.version))

    def count(self, now: float, change: int) -> None:
        self.open_seconds += self._total * (now - self._now)
        self._total += change
        self._now = now
