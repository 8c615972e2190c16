"""Which replicas a request is offered to: the one it names, its session's, or those that know most of its prompt.

    session   the nearest replicas on a ring: every router agrees without a word, and a new replica takes over only its
              own share
    prefix    replicas that have read the longest known beginning, by what this router has sent and by what the replicas
              report; if nobody has, the nearest ones of its shortest beginning
    neither   DRAWN replicas by chance, of which the least busy one gets the request

Affinity yields where a replica is much busier than the least busy one of those drawn. The work for a request does not
grow with the number of replicas. Knows nothing of Ray: `router.py` asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random

from paceline.cluster.ring import Ring

MAX_BEGINNINGS = 8192  # that a replica can report; beyond that, those that were used longest ago are forgotten
MAX_REMEMBERED = 1 << 18  # beginnings of all replicas that a router remembers: 60 MB with one replica each
MAX_HOMES = 32  # replicas that are remembered for a beginning, those that were the last to read it first
DRAWN = 4  # replicas among which the least busy one is looked for; so few replicas are all looked at
NEAREST = 2  # replicas of a key on the ring: where the first is full or busy, all routers agree on the next

Busy = Callable[[str], int]  # replica → requests that it has, as far as the router knows


@dataclass(frozen=True, slots=True)
class Wish:
    """The wishes of a request about its replica: session, and beginning of its prompt."""

    replica: str | None = None  # the only one that may answer
    session: str | None = None
    beginnings: tuple[str, ...] = ()  # of its prompt, the shortest first


NO_WISH = Wish()


class Beginnings:
    """Hashes in the order of their last use, at most MAX_BEGINNINGS."""

    def __init__(self) -> None:
        self.uses = 0  # so many of the latest may be new to somebody who saw none
        self._hashes: dict[str, None] = {}

    def add(self, hashes: Iterable[str]) -> None:
        for each in hashes:
            self._hashes.pop(each, None)
            self._hashes[each] = None
            self.uses += 1
        while len(self._hashes) > MAX_BEGINNINGS:
            del self._hashes[next(iter(self._hashes))]

    def latest(self, count: int) -> list[str]:
        return list(self._hashes)[-count:]


class Homes:
    """Replicas by the beginnings that they have read, in the order of their last use, at most MAX_REMEMBERED."""

    def __init__(self) -> None:
        self._homes: dict[str, list[str]] = {}

    def add(self, replica: str, hashes: Iterable[str]) -> None:
        for each in hashes:
            homes = self._homes.pop(each, [])
            if replica not in homes:
                homes.append(replica)
                del homes[:-MAX_HOMES]
            self._homes[each] = homes
        while len(self._homes) > MAX_REMEMBERED:
            del self._homes[next(iter(self._homes))]

    def of(self, each: str) -> list[str]:
        return self._homes.get(each, [])

    def __len__(self) -> int:
        return len(self._homes)


@dataclass(slots=True)
class Affinity:
    """The choices of one router, and what it remembers of them."""

    max_imbalance: int = 8
    prefixes: bool = True  # False: sessions alone
    random: Random = field(default_factory=Random)
    hits: int = 0  # requests with beginnings that went where one is known
    misses: int = 0  # those whose beginnings nobody knew, or that a busy replica gave up
    _replicas: dict[str, None] = field(default_factory=dict)
    _names: list[str] = field(default_factory=list)  # the same, to draw from
    _ring: Ring | None = None  # None: nobody has asked for it since the replicas changed
    _homes: Homes = field(default_factory=Homes)

    def keep(self, replicas: Iterable[str]) -> None:
        """Choose among these replicas from now on. Those that are gone are never offered again."""
        found = dict.fromkeys(replicas)
        if found.keys() != self._replicas.keys():
            self._replicas, self._names, self._ring = found, [*found], None

    def ranks(self, wish: Wish, busy: Busy) -> list[list[str]]:
        """Offer replicas: a later group is asked when the ones before take no more, and then others are drawn."""
        if wish.replica is not None and wish.replica in self._replicas:
            return [[wish.replica]]
        if wish.session is not None:
            return [*([name] for name in self._nearest(wish.session)), self._drawn()]
        if wish.beginnings and self.prefixes:
            return self._by_prefix(wish.beginnings, busy)
        return [self._drawn()]

    def _by_prefix(self, beginnings: tuple[str, ...], busy: Busy) -> list[list[str]]:
        near, others = self._knowing(beginnings) or self._nearest(beginnings[0]), self._drawn()
        least = min(map(busy, others))
        return [others] if min(map(busy, near)) > least + self.max_imbalance else [near, others]

    def _knowing(self, beginnings: tuple[str, ...]) -> list[str]:
        """Return replicas that know the longest beginning which anybody knows, at most DRAWN of them."""
        for each in reversed(beginnings):
            homes = [name for name in self._homes.of(each) if name in self._replicas]
            if homes:
                return homes if len(homes) <= DRAWN else self.random.sample(homes, DRAWN)
        return []

    def _nearest(self, key: str) -> list[str]:
        if self._ring is None:
            self._ring = Ring(self._replicas)
        return self._ring.nearest(key, NEAREST)

    def _drawn(self) -> list[str]:
        """Draw up to DRAWN replicas, in any order: of equally busy ones the first gets the request."""
        if len(self._names) <= DRAWN:
            return self.random.sample(self._names, len(self._names))
        return [*dict.fromkeys(self.random.choices(self._names, k=DRAWN))]

    def routed(self, wish: Wish, replica: str) -> None:
        """Note where a request went."""
        if not wish.beginnings:
            return
        known = any(replica in self._homes.of(each) for each in wish.beginnings)
        self.hits += known
        self.misses += not known
        self._homes.add(replica, wish.beginnings)

    def learn(self, replica: str, beginnings: Iterable[str]) -> None:
        """Take over what a replica reports: other routers send to it, too."""
        self._homes.add(replica, beginnings)
