"""One simulated replica: sequences that decode together, prompts that are read beside them, requests that wait.

Time moves by groups of equal steps, which end where something happens: a sequence ends, or a request may join.

    group    now ├─ step ─┼─ step ─┼─ step ─┤ ends        every sequence has `progress` more tokens
    arrival                   ▲ cuts the group here ┘      at the end of the step in which it comes

A request has its first token at the end of the step that reads the last of its prompt. It is admitted once its whole
prompt and answer have room, so that nothing is preempted. Prompts are read one after the other.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from math import ceil

from paceline.plan.service import Service
from paceline.plan.workload import Requests

EPSILON = 1e-9  # tokens; sums of means are not exact


class Replica:
    """`first` and `finish` are filled with the seconds at which requests have their first and last token."""

    __slots__ = (
        "_begun",
        "_cached",
        "_context",
        "_held",
        "_reading",
        "_requests",
        "_running",
        "_service",
        "_steps",
        "_taken",
        "busy",
        "ends",
        "finish",
        "first",
        "hits",
        "progress",
        "step",
        "version",
        "waiting",
    )

    def __init__(self, service: Service, requests: Requests, first: list[float], finish: list[float]) -> None:
        self._service, self._requests = service, requests
        self.first, self.finish = first, finish
        self.waiting: deque[int] = deque()
        self._reading: deque[list[int]] = deque()  # request, tokens to read, tokens read
        self._running: list[tuple[float, int]] = []  # heap: progress at which it ends, request
        self._cached: dict[int, None] = {}  # prefixes, the latest used last
        self._held = 0  # tokens of KV memory that requests have
        self._context = 0.0  # tokens of context of all running sequences, less `progress` for each
        self.progress = 0.0  # tokens that a sequence which ran from the beginning would have
        self.ends: float | None = None  # end of the group that runs; None: idle
        self._begun = 0.0  # beginning of that group
        self.step = 0.0  # seconds of each of its steps
        self._steps = 0
        self._taken: list[int] = []  # requests whose prompts end with that group
        self.version = 0  # changes with `ends`
        self.busy = 0.0  # seconds
        self.hits = 0  # prompts whose prefix was there

    def arrive(self, request: int, now: float) -> None:
        """Take a request. If it may join at once, the group that runs ends with the step that runs."""
        self.waiting.append(request)
        if self.ends is None:
            self._begin(now)
        elif self._steps > 1 and len(self.waiting) == 1 and self._fits(request):
            steps = max(1, ceil((now - self._begun) / self.step))
            if steps < self._steps:
                self._steps = steps
                self.ends = self._begun + steps * self.step
                self.version += 1

    def end_group(self) -> int:
        """Move to the end of the group that runs, and begin the next one; return how many requests have ended."""
        now, ended = self.ends, 0
        assert now is not None, "no group runs"
        self.busy += now - self._begun
        count = len(self._running)
        if count:
            self.progress += self._steps * self._service.tokens[count]
            ended = self._complete(now)
        for request in self._taken:
            ended += self._start(request, now)
        self._taken = []
        self._begin(now)
        return ended

    def _complete(self, now: float) -> int:
        running, ended = self._running, 0
        reached = self.progress + EPSILON
        while running and running[0][0] <= reached:
            mark, request = heappop(running)
            self._context -= self._requests.prompts[request] - (mark - self._requests.outputs[request] + 1)
            self._release(request, now)
            ended += 1
        return ended

    def _release(self, request: int, now: float) -> None:
        self.finish[request] = now
        self._held -= self._need(request)

    def _start(self, request: int, now: float) -> int:
        """Give a request its first token; return 1 if that is its last."""
        requests = self._requests
        self.first[request] = now
        if requests.prefixes[request] >= 0:
            self._remember(requests.prefixes[request])
        if requests.outputs[request] == 1:
            self._release(request, now)
            return 1
        heappush(self._running, (self.progress + requests.outputs[request] - 1, request))
        self._context += requests.prompts[request] - self.progress
        return 0

    def _begin(self, now: float) -> None:
        self._admit()
        self._begun = now
        self.version += 1
        if self._reading:
            self._steps, self.step = 1, self._read()
        elif self._running:
            self._decode()
        else:
            self.ends = None
            return
        self.ends = now + self._steps * self.step

    def _decode(self) -> None:
        """Plan steps until the first sequence ends."""
        service, count = self._service, len(self._running)
        tokens = service.tokens[count]
        self._steps = max(1, ceil((self._running[0][0] - self.progress - EPSILON) / tokens))
        context = self._context + count * (self.progress + tokens * (self._steps - 1) / 2)
        self.step = service.steps[count] + service.slopes[count] * context

    def _read(self) -> float:
        """Plan a step that reads prompts; return its seconds."""
        service, reading, count = self._service, self._reading, len(self._running)
        rows = service.rows_beside if count else service.rows_alone
        taken, pairs = 0, 0.0
        while reading and taken < rows:
            part = reading[0]
            some = min(part[1], rows - taken)
            pairs += some * (part[2] + (some + 1) / 2)
            taken += some
            part[1] -= some
            part[2] += some
            if not part[1]:
                self._taken.append(reading.popleft()[0])
        seconds = service.reading(taken) + service.attention * pairs
        if count:
            seconds += service.steps[count] + service.slopes[count] * (self._context + count * self.progress)
        return seconds

    def _admit(self) -> None:
        waiting, requests = self.waiting, self._requests
        while waiting and self._fits(waiting[0]):
            request = waiting.popleft()
            prefix, shared = requests.prefixes[request], 0
            if prefix in self._cached:
                shared = requests.prefix_tokens
                self.hits += 1
                self._remember(prefix)
            self._held += self._need(request)
            self._evict()
            self._reading.append([request, requests.prompts[request] - shared, shared])

    def _fits(self, request: int) -> bool:
        service = self._service
        if len(self._running) + len(self._reading) + len(self._taken) >= service.max_sequences:
            return False
        return self._held + self._need(request) <= service.kv_tokens

    def _need(self, request: int) -> int:
        return self._requests.prompts[request] + self._requests.outputs[request]

    def _remember(self, prefix: int) -> None:
        """Put a prefix last among those that will be forgotten."""
        self._cached.pop(prefix, None)
        self._cached[prefix] = None

    def _evict(self) -> None:
        """Forget the prefixes that were not used for the longest time, until all others have room."""
        each, room = self._requests.prefix_tokens, self._service.kv_tokens - self._held
        while self._cached and len(self._cached) * each > room:
            del self._cached[next(iter(self._cached))]
