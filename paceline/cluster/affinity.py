"""Which replica a request goes to: the one it names, its session's, or the one that knows most of its prompt.

    session   rendezvous hashing: every router agrees without a word, and a new replica takes over only its own share
    prefix    the longest known beginning, by what this router has sent and by what the replicas report

Affinity yields where a replica is much busier than the least busy one. Knows nothing of Ray: `router.py` asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

MAX_BEGINNINGS = 8192  # of a replica in memory; beyond that, those that were used longest ago are forgotten


@dataclass(frozen=True, slots=True)
class Wish:
    """The wishes of a request about its replica: session, and beginning of its prompt."""

    replica: str | None = None  # the only one that may answer
    session: str | None = None
    beginnings: tuple[str, ...] = ()  # of its prompt, the shortest first


class Beginnings:
    """Hashes in the order of their last use, at most MAX_BEGINNINGS."""

    def __init__(self) -> None:
        self._hashes: dict[str, None] = {}

    def add(self, hashes: Iterable[str]) -> None:
        for each in hashes:
            self._hashes.pop(each, None)
            self._hashes[each] = None
        while len(self._hashes) > MAX_BEGINNINGS:
            del self._hashes[next(iter(self._hashes))]

    def latest(self, count: int) -> list[str]:
        return list(self._hashes)[-count:]

    def shared(self, hashes: Sequence[str]) -> int:
        """Count how many of these beginnings, from the shortest on, are known."""
        return next((i for i, each in enumerate(hashes) if each not in self._hashes), len(hashes))


@dataclass(slots=True)
class Affinity:
    """The choices of one router, and what it remembers of them."""

    max_imbalance: int = 8
    prefixes: bool = True  # False: sessions alone
    hits: int = 0  # requests with beginnings that went where one is known
    misses: int = 0  # those whose beginnings nobody knew, or that a busy replica gave up
    _known: dict[str, Beginnings] = field(default_factory=dict)  # by replica
    _turn: int = 0  # requests without a wish

    def ranks(self, wish: Wish, busy: Mapping[str, int]) -> list[list[str]]:
        """Order the replicas: a later group is asked when the ones before take no more. `busy`: requests of each."""
        if wish.replica is not None and wish.replica in busy:
            return [[wish.replica]]
        if wish.session is not None:
            return [[name] for name in rendezvous(wish.session, busy)]
        if wish.beginnings and self.prefixes:
            return self._by_prefix(wish.beginnings, busy)
        self._turn += 1
        return [rendezvous(str(self._turn), busy)]  # the least busy; of several, any

    def _by_prefix(self, beginnings: tuple[str, ...], busy: Mapping[str, int]) -> list[list[str]]:
        order = rendezvous(beginnings[0], busy)
        shared = {name: self._of(name).shared(beginnings) for name in order}
        most = max(shared.values())
        knowing = [name for name in order if shared[name] == most]
        least = min(busy.values())
        if not most or min(busy[name] for name in knowing) > least + self.max_imbalance:
            return [order]
        return [knowing, [name for name in order if name not in knowing]]

    def routed(self, wish: Wish, replica: str) -> None:
        """Note where a request went."""
        if not wish.beginnings:
            return
        known = self._of(replica)
        self.hits += bool(known.shared(wish.beginnings))
        self.misses += not known.shared(wish.beginnings)
        known.add(wish.beginnings)

    def learn(self, replica: str, beginnings: Iterable[str]) -> None:
        """Take over what a replica reports: other routers send to it, too."""
        self._of(replica).add(beginnings)

    def keep(self, replicas: Iterable[str]) -> None:
        """Forget replicas that are gone."""
        alive = set(replicas)
        self._known = {name: known for name, known in self._known.items() if name in alive}

    def _of(self, replica: str) -> Beginnings:
        return self._known.setdefault(replica, Beginnings())


def rendezvous(key: str, names: Iterable[str]) -> list[str]:
    """Order names by their hash with the key: the first is a fair draw that another name changes only by winning it."""
    return sorted(names, key=lambda name: blake2b(f"{key}\0{name}".encode(errors="replace"), digest_size=8).digest())
