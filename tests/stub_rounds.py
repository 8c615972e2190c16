"""A device that computes nothing: steps take the time that a test gives them, by a clock of the test's own."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.config import EngineConfig
from paceline.drafters.guard import Guard
from paceline.engine.engine import Engine
from paceline.kv.cache import KVCache
from paceline.runner.lanes import Lanes
from paceline.runner.rounds.batch_times import BatchTimes
from paceline.runner.rounds.protocol import Chunk, DeviceDrafter, DraftingRound, Landed, Seat, Ticket, Times
from paceline.sampling.sampler import Sampler
from paceline.types import Request, SamplingParams, Speculation
from tests.tiny_models import TARGET

CONTEXT = 1024
TOKEN = 7  # the only token of every text
ONLY_COPIES = -1  # stands for the draft length of rounds without a network


@dataclass(slots=True)
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Stub:
    """Implements DeviceDrafter, in name only."""

    reader, finds_fewer = None, True

    def draft(self, round: DraftingRound) -> None:
        raise AssertionError("a device that computes nothing runs no drafter")


@dataclass
class StubRounds:
    """Implements Rounds. The host is busy for `host` seconds with each launch, by its seats; the device then runs the
    step for `device` seconds, by its seats and drafted tokens. A drafted token is right with probability `rate`."""

    clock: Clock
    device: Callable[[int, int], float]
    host: Callable[[Sequence[Seat]], float]
    rate: float = 0.5
    found: float = 1.0  # probability that a seat gets a draft
    drafters: Mapping[str, DeviceDrafter] = field(default_factory=lambda: {"stub": Stub()})
    readers: Collection[str] = ()
    tapping: Collection[str] = ()
    catch_up: float = 0.0  # seconds of host and device in which a drafter reads what it has missed
    max_draft: int = 4
    timed: bool = True
    synthetic_acceptance: float = 0.0
    judge: Any = None
    tokens: int = 0  # of all seats so far
    rounds: int = 0  # rounds with seats so far
    drafting: int = 0  # those with drafts

    def __post_init__(self) -> None:
        self._free_at = 0.0  # time at which the device has done everything
        self._random = random.Random(1)
        self._seconds: defaultdict[int, BatchTimes] = defaultdict(BatchTimes)

    def write(self, lane: int, tokens: np.ndarray, sampler: Sampler, prediction: Sequence[int] = ()) -> None:
        pass

    def set_pages(self, lane: int, first: int, pages: Sequence[int]) -> None:
        pass

    def launch(
        self,
        chunks: Sequence[Chunk],
        seats: Sequence[Seat],
        *,
        drafter: str | None,
        context: int,
        masked: Sequence[int] = (),
    ) -> Ticket:
        missed = any(not chunk.target for chunk in chunks)
        self.clock.now += self.host(seats) + self.catch_up * missed
        landed = [self._land(seat) for seat in seats]
        drafted, longest = sum(len(each.drafted) for each in landed), max([seat.max_draft for seat in seats], default=0)
        took = self.device(len(seats), drafted) + self.catch_up * missed
        self._free_at = max(self._free_at, self.clock.now) + took
        if seats and (not chunks or missed):
            self.rounds += 1
        self.drafting += longest > 0
        drafting = sum(seat.longest > 0 for seat in seats)
        if not longest and drafting:
            longest = ONLY_COPIES
        return chunks, landed, Times(step=took, verify=took), self._free_at, longest, drafting

    def wait(self, ticket: Ticket) -> None:
        self.clock.now = max(self.clock.now, ticket[3])

    def collect(self, ticket: Ticket) -> tuple[list[Landed | None], list[Landed], Times]:
        chunks, landed, times, _, longest, drafting = ticket
        self.wait(ticket)
        if landed and not chunks:
            self._seconds[longest].learn(len(landed), times.step, drafting=drafting)
        self.tokens += sum(len(each.tokens) for each in landed)
        return [Landed((), (), (TOKEN,)) if chunk.draws else None for chunk in chunks], landed, times

    def round_seconds(self, batch: int, draft: int, drafter: str) -> float | None:
        return self._seconds[draft].near(batch)

    def improve(self) -> bool:
        return False

    def _land(self, seat: Seat) -> Landed:
        drafted = seat.max_draft if self._random.random() < self.found else 0
        accepted = next((i for i in range(drafted) if self._random.random() >= self.rate), drafted)
        return Landed(tuple(range(accepted)), (TOKEN,) * drafted, (TOKEN,) * (accepted + 1))


def engine_with(
    rounds: StubRounds, *, batch: int, drafters: Mapping[str, Guard] | None = None, measure_speedup: bool = False
) -> Engine:
    """Return an engine whose steps run in these rounds. With `drafters` of the host, the first one drafts."""
    config = EngineConfig.of(
        max_sequences=batch,
        max_draft=4,
        max_draft_batch=batch,
        max_step_tokens=64 * batch,
        max_draft_tokens=8 * batch,
        measure_speedup=measure_speedup,
    )
    forward = TARGET.forward("toy", num_pages=batch * CONTEXT // 16)
    return Engine(
        forward,
        config=config,
        lanes=Lanes(count=batch, max_context=CONTEXT, max_draft=4),
        cache=KVCache(forward.kv, share_prefixes=False),
        max_context=CONTEXT,
        drafters=drafters,
        default_drafter=next(iter(drafters or {}), "stub"),
        rounds=rounds,
        clock=rounds.clock,
    )


def submit(engine: Engine, id: str, *, enabled: bool = True) -> None:
    """Submit a request for 900 tokens."""
    sampling = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
    engine.submit(Request(id=id, prompt=(1, 2, 3), sampling=sampling, speculation=Speculation(enabled=enabled)))
