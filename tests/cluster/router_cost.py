"""Measure what a choice of the router costs, by the number of replicas: `python -m tests.cluster.router_cost`.

A choice is what `AffinityRouter` asks `Affinity` for when a request comes. Ray and the reading of headers are not in
it. Replicas have a few requests each; there are 1,000 sessions, and 1,000 prompts of 1,200 characters with five
beginnings each. The best of several rounds counts: other programs only make it slower.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from random import Random

from paceline.cluster.affinity import NO_WISH, Affinity, Wish
from paceline.cluster.prefixes import hashes

REPLICAS = (10, 100, 1000)
REQUESTS = 2000  # of a round
ROUNDS = 15
SESSIONS = [Wish(session=f"session {i}") for i in range(1000)]
PROMPTS = [Wish(beginnings=hashes(f"prompt {i:04} " * 100)) for i in range(1000)]
KINDS: dict[str, Sequence[Wish]] = {"without a wish": [NO_WISH], "by session": SESSIONS, "by prefix": PROMPTS}


def loads(count: int) -> dict[str, int]:
    """The requests of each replica, under names as long as Ray's."""
    draw = Random(0)
    return {f"{draw.getrandbits(32):08x}": draw.randrange(8) for _ in range(count)}


def made(busy: dict[str, int]) -> Callable[[Wish], object]:
    """A router that has seen each prompt once, as a function of a wish."""
    router = Affinity(random=Random(0))
    router.keep(busy)

    def choose(wish: Wish) -> list[list[str]]:
        return router.ranks(wish, busy.__getitem__)

    for wish in PROMPTS:
        router.routed(wish, min(choose(wish)[0], key=busy.__getitem__))
    return choose


def microseconds(choose: Callable[[Wish], object], wishes: Sequence[Wish], *, rounds: int = ROUNDS) -> float:
    """The microseconds of a choice in the best of some rounds."""
    asked = [wishes[i % len(wishes)] for i in range(REQUESTS)]
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        for wish in asked:
            choose(wish)
        times.append(time.perf_counter() - began)
    return 1e6 * min(times) / REQUESTS


def main() -> None:
    print(f"Python {sys.version.split()[0]}, microseconds a request\n")
    print(f"| replicas | {' | '.join(KINDS)} |\n| ---: |{' ---: |' * len(KINDS)}")
    for count in REPLICAS:
        choose = made(loads(count))
        cells = [f"{microseconds(choose, wishes):.1f}" for wishes in KINDS.values()]
        print(f"| {count} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
