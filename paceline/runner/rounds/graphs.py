"""The rounds of an engine by bucket: recorded as graphs before they are wanted, and chosen for each step.

No step waits for a recording. At the start the buckets that traffic will need are recorded, the most useful first,
until a time is up; the others follow while the engine is idle. A step takes the cheapest recorded round that serves it.
If none does, the round runs launch by launch, at the price of its launches on the host; when the same bucket is wanted
again, its launches are recorded on the way to the first replay, at the same price. A bucket that a larger one serves
gets a graph of its own in an idle moment.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from paceline.runner.rounds.buckets import Bucket

CHEAPER_SHARE = 0.3  # share of the start's time up to which buckets are recorded that only make steps cheaper


@dataclass(frozen=True, slots=True)
class Prepared:
    """The work of the start, for those who want to know where the time went."""

    graphs: int
    record_seconds: float
    compile_seconds: float  # for compiling kernels, or loading them from Triton's cache on disk
    bytes: int  # memory of the device

    def __str__(self) -> str:
        return (
            f"{self.graphs} recorded in {self.record_seconds:.1f} s, {self.bytes / 2**20:.0f} MiB of the device; "
            f"kernels compiled in {self.compile_seconds:.1f} s"
        )


class Recordable(Protocol):
    """A round whose launches can be recorded."""

    def run_once(self) -> None:
        """Launch on the dummy lane, so that every kernel is compiled and every buffer exists."""

    def record(self) -> None:
        """Record the launches of the round, which has run before. Waits for nothing on the device."""


Round = TypeVar("Round", bound=Recordable)


class Graphs(Generic[Round]):
    def __init__(self, make: Callable[[Bucket], Round], *, has_room: Callable[[], bool]) -> None:
        """`has_room`: whether the device has memory for one more graph."""
        self._make = make
        self._has_room = has_room
        self._recorded: dict[Bucket, Round] = {}
        self._eager: dict[Bucket, Round] = {}  # ran launch by launch, not recorded yet
        self._serving: dict[Bucket, Bucket | None] = {}  # wanted → recorded bucket that serves it best
        self._missed: Counter[Bucket] = Counter()  # wanted buckets, by steps that a larger one served
        self._rest: Iterator[Bucket] = iter(())  # buckets to record while the engine is idle

    def __len__(self) -> int:
        return len(self._recorded)

    def start(
        self,
        buckets: Iterable[Bucket],
        *,
        seconds: float,
        needed: int | None = None,
        report: Callable[[int, int], None] = lambda done, total: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Record these buckets in order: the `needed` first ones, or all, for about `seconds`, the others only for
        CHEAPER_SHARE of that. `report` gets the numbers of recorded and of all."""
        wanted = list(buckets)
        self._rest, began, first = iter(wanted), clock(), len(wanted) if needed is None else needed
        while clock() - began < seconds * (1.0 if len(self._recorded) < first else CHEAPER_SHARE) and self.improve():
            report(len(self._recorded), len(wanted))

    def improve(self) -> bool:
        """Record one more bucket, see `missing`. False: there is none. Only for moments in which no step is in
        flight."""
        bucket = self.missing()
        if bucket is None:
            return False
        self.add(bucket)
        return True

    def missing(self) -> Bucket | None:
        """Return the bucket that is to be recorded next: the one that steps have missed most, or the next of the start.
        None: there is none, or no memory."""
        bucket = next((wanted for wanted, _ in self._missed.most_common()), None) or self._next_of_start()
        return bucket if bucket is not None and self._has_room() else None

    def add(self, bucket: Bucket) -> None:
        """Record a bucket."""
        made = self._make(bucket)
        made.run_once()
        self._record(bucket, made)

    def find(self, wanted: Bucket) -> tuple[Bucket, Round]:
        """Return the round that runs a step of the bucket `wanted`, and its own bucket."""
        if wanted not in self._serving:
            serving = [bucket for bucket in self._recorded if bucket.serves(wanted)]
            self._serving[wanted] = min(serving, key=lambda bucket: bucket.cost) if serving else None
        serves = self._serving[wanted]
        if serves is not None:
            if serves.shape != wanted.shape:
                self._missed[wanted] += 1
            return serves, self._recorded[serves]
        return wanted, self.round_of(wanted)

    def round_of(self, bucket: Bucket) -> Round:
        """Return the round of this very bucket, recorded if it was or if it runs for the second time."""
        made = self._eager.get(bucket)
        if made is None:
            made = self._recorded.get(bucket)
            if made is None:  # its first run compiles its kernels and makes its buffers
                made = self._eager[bucket] = self._make(bucket)
        elif not bucket.eager and self._has_room():
            self._record(bucket, made)
        return made

    def _record(self, bucket: Bucket, made: Round) -> None:
        made.record()
        self._recorded[bucket] = made
        self._eager.pop(bucket, None)
        self._missed.pop(bucket, None)
        self._serving.clear()

    def _next_of_start(self) -> Bucket | None:
        return next((bucket for bucket in self._rest if bucket not in self._recorded), None)
