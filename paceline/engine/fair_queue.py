"""The queue of waiting sequences: who is next. Preempted ones are first, then the tenant that was served least.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024):

    counter   READ × tokens of prompts that were read + WRITTEN × tokens that were generated
    next      the tenant that waits with the smallest counter, of several the one whose last turn is the longest ago;
              within a tenant the first that came
    lift      a tenant that did not wait starts no lower than those that do: time in which it asked for little is no
              credit

A prompt is paid for when its sequence is admitted, without what the prefix cache has. Generated tokens are paid for
when somebody looks: a step does nothing for fairness. A preempted sequence that is admitted again pays nothing twice.

A tenant with nothing open is forgotten once one is admitted that was served as much, or nobody has anything open.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.engine.sequence import Sequence
from paceline.engine.stats import TenantLoad

READ, WRITTEN = 1, 2  # weights of a token that is read, and of one that is generated: those of the paper


@dataclass(slots=True)
class Tenant:
    """The open sequences of one tenant, and what it was served."""

    counter: int = 0
    turn: int = 0  # number of its last turn; 0: it had none
    open: int = 0  # sequences that have not ended: waiting, preempted or running
    waiting: deque[Sequence] = field(default_factory=deque)  # in order of arrival, without preempted ones
    running: list[Sequence] = field(default_factory=list)

    @property
    def first(self) -> Sequence | None:
        """The sequence that is next within the tenant."""
        for sequence in self.waiting:
            if not sequence.waits_for_scores:
                return sequence
        return None

    def start(self, sequence: Sequence, *, read: int) -> None:
        """Note that a sequence runs, and pay for `read` tokens of its prompt if it does so for the first time."""
        self.running.append(sequence)
        if not sequence.paid:
            self.counter += READ * read
            sequence.paid = sequence.prompt_length

    def stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._pay(sequence)

    def settle(self) -> None:
        """Pay for all tokens that were generated until now."""
        for sequence in self.running:
            self._pay(sequence)

    def _pay(self, sequence: Sequence) -> None:
        total = len(sequence.tokens)
        self.counter += WRITTEN * (total - sequence.paid)
        sequence.paid = total


class FairQueue:
    """Sequences without a lane. It also hears of those that run: their tenants are served."""

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._preempted: deque[Sequence] = deque()  # the latest first
        self.count = 0  # sequences that wait
        self._turns = 0  # admissions without those of preempted sequences
        self._floor = 0  # counter of the tenant that was admitted last: none that comes back starts lower

    def sequences(self) -> list[Sequence]:
        """List those that wait, preempted ones first."""
        found = [*self._preempted]
        for tenant in self._tenants.values():
            found += tenant.waiting
        return found

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queue new sequences of one request."""
        for sequence in sequences:
            name = sequence.request.tenant
            tenant = self._tenants.get(name)
            if tenant is None:
                tenant = self._tenants[name] = Tenant()
            if not tenant.waiting and len(self._tenants) > 1:
                self._lift(tenant)
            tenant.waiting.append(sequence)
            tenant.open += 1
            self.count += 1

    def next(self) -> Sequence | None:
        """Return the sequence that is to be admitted next; None: nobody waits who could be."""
        if self._preempted:
            return self._preempted[0]
        ready = [(tenant, first) for tenant in self._tenants.values() if (first := tenant.first) is not None]
        if len(ready) > 1:
            for tenant, _ in ready:
                tenant.settle()
        return min(ready, key=_served)[1] if ready else None

    def start(self, sequence: Sequence, *, read: int) -> None:
        """Take a sequence out of the queue: it runs now, and reads so many tokens."""
        tenant = self._tenants[sequence.request.tenant]
        self._dequeue(sequence, tenant)
        if not sequence.paid:
            self._turns += 1
            tenant.turn = self._turns
            if len(self._tenants) > 1:
                tenant.settle()
                self._raise_floor(tenant.counter)
        tenant.start(sequence, read=read)

    def put_back(self, sequence: Sequence) -> None:
        """Queue a sequence that was preempted, before all others."""
        self._tenants[sequence.request.tenant].stop(sequence)
        self._preempted.appendleft(sequence)
        self.count += 1

    def stop(self, sequence: Sequence) -> None:
        """Note that a running sequence has ended."""
        tenant = self._tenants[sequence.request.tenant]
        tenant.stop(sequence)
        self._close(tenant)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of the queue that has ended before it ran, or after it was preempted."""
        tenant = self._tenants[sequence.request.tenant]
        self._dequeue(sequence, tenant)
        self._close(tenant)

    def loads(self) -> dict[str, TenantLoad]:
        """Say of each tenant that is not forgotten what waits and runs, and what it was served."""
        for tenant in self._tenants.values():
            tenant.settle()
        return {
            name: TenantLoad(waiting=each.open - len(each.running), running=len(each.running), counter=each.counter)
            for name, each in self._tenants.items()
        }

    def _dequeue(self, sequence: Sequence, tenant: Tenant) -> None:
        queue = self._preempted if sequence.paid else tenant.waiting
        queue.remove(sequence)
        self.count -= 1

    def _lift(self, tenant: Tenant) -> None:
        """Raise the counter of a tenant that begins to wait to that of those who wait, or else run."""
        others = [other for other in self._tenants.values() if other is not tenant and other.open]
        for other in others:
            other.settle()
        waiting = [other.counter for other in others if other.waiting] or [other.counter for other in others]
        tenant.counter = max(tenant.counter, self._floor, min(waiting, default=0))

    def _raise_floor(self, counter: int) -> None:
        """Note the counter of a tenant that is admitted; forget those with nothing open that were served no more."""
        self._floor = max(self._floor, counter)
        for name in [n for n, each in self._tenants.items() if not each.open and each.counter <= self._floor]:
            del self._tenants[name]

    def _close(self, tenant: Tenant) -> None:
        """Count an end. When nothing is open any more, everything is forgotten."""
        tenant.open -= 1
        if not tenant.open and not any(each.open for each in self._tenants.values()):
            self._tenants.clear()
            self._floor = 0


def _served(ready: tuple[Tenant, Sequence]) -> tuple[int, int]:
    """Order tenants by what they were served, and those that were served the same by their last turn."""
    tenant, _ = ready
    return tenant.counter, tenant.turn
