"""Which sequences compute how many tokens in the next step. No phases: prefill, decoding and verification are all
"compute tokens [a, b) of this sequence", and share one budget of rows.

Order of the budget: one row for each decoding sequence; then drafts and prefill chunks, each sure of half of what is
left, and split fairly so that a short prompt is not stuck behind a long one. When pages run out, drafts are dropped
first; then the sequence that came last gives its pages up and is computed again later. While steps are in the air
nobody is made to yield: the plan says that it falls short, everything lands, and there is a new plan.

A sequence that ends in the air keeps its lane and its pages until the last step that may write to them has landed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from paceline.config import EngineConfig
from paceline.draft import EMPTY, Draft
from paceline.engine.governor import Governor, fair_split
from paceline.engine.in_flight import Air
from paceline.engine.sequence import Sequence
from paceline.kernels.base import PAGE_SIZE
from paceline.kv.cache import KVCache
from paceline.runner.lanes import Lanes
from paceline.types import Off, OffKind


@dataclass(slots=True)
class Work:
    """One sequence's part of a step: committed tokens [start, start + count), then a draft if it reaches the end."""

    sequence: Sequence
    start: int
    count: int
    samples: bool  # the last committed token is among the rows, so that the next one can be drawn
    max_draft: int = 0
    drafter: str | None = None  # who may draft; the sequence's own may be another by the time the step has landed
    draft: Draft = EMPTY  # what was drafted; on a device known when the step has landed
    forced: bool = False  # the draft is the grammar's, not the drafter's
    first_out: int = 0  # of its rows among the outputs of the pass
    root: int = 0  # the output of the last committed token; those of the draft follow it
    drawn: bool = False  # in the pass itself, where it can

    @property
    def rows(self) -> int:
        return self.count + len(self.draft.tokens)

    @property
    def outs(self) -> int:
        """Committed rows whose logits are wanted; those of the draft come on top."""
        return self.count if self.sequence.wants_prompt_logprobs else int(self.samples)


@dataclass(slots=True)
class StepPlan:
    """Who computes what, with the pages reserved."""

    works: list[Work] = field(default_factory=list)
    decodes: bool = True  # every sequence computes its last token, and nothing of a prompt
    preempted: list[Sequence] = field(default_factory=list)  # lost their lane
    falls_short: bool = False  # of pages: land everything and plan again
    crowded: bool = False  # so many sequences run that nobody may draft


class Scheduler:
    def __init__(
        self,
        config: EngineConfig,
        *,
        lanes: Lanes,
        cache: KVCache,
        governor: Governor,
        knows: Callable[[Sequence, int], bool] = lambda sequence, page: True,
    ) -> None:
        """`knows`: whether a page of the prefix cache will do for a sequence, or has to be computed again."""
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.leaving: list[Sequence] = []  # ended while in the air
        self._config = config
        self._lanes = lanes
        self._cache = cache
        self._governor = governor
        self._knows = knows
        self._turn = 0  # where the row budget starts when it does not reach everybody

    def admit(self) -> list[Sequence]:
        """Those that get a lane now."""
        started: list[Sequence] = []
        while self.waiting and self._lanes.free:
            pages = len(self.waiting[0].tokens) // PAGE_SIZE + 1
            if (self.running or self.leaving) and not self._cache.pool.can_take(pages):
                break
            started.append(self.waiting.popleft())
            self._enter(started[-1])
        return started

    def plan(self) -> StepPlan:
        plan = StepPlan(crowded=len(self.running) > self._config.max_draft_batch)
        for work in self._divide_rows():
            if work.sequence.lane >= 0 and self._reserve(work, plan):
                plan.works.append(work)
                plan.decodes = plan.decodes and work.count == 1 and work.samples
        if plan.preempted:
            plan.works = [work for work in plan.works if work.sequence.lane >= 0]  # a later one may have preempted it
        return plan

    def leave(self, sequence: Sequence) -> None:
        """The sequence ended: free all it holds, or see to it that its last flight does."""
        if sequence.lane < 0:
            self.waiting.remove(sequence)
        elif sequence.air.flights:
            self.running.remove(sequence)
            self.leaving.append(sequence)
            sequence.air.left = True
        else:
            self._withdraw(sequence)

    def release(self, sequence: Sequence) -> None:
        """The last flight of a sequence that left has landed."""
        self.leaving.remove(sequence)
        self._free(sequence)

    def _enter(self, sequence: Sequence) -> None:
        tokens = np.asarray(sequence.tokens, dtype=np.int32)
        sequence.lane = self._lanes.take()
        sequence.span = self._cache.open(
            tokens,
            salt=sequence.request.cache_salt,
            reuse=not sequence.wants_prompt_logprobs,
            wanted=lambda page: self._knows(sequence, page),
        )
        sequence.counters.cached_tokens += sequence.span.committed
        self._lanes.tokens_np[sequence.lane, : len(tokens)] = tokens
        self._lanes.lengths_np[sequence.lane] = len(tokens)
        self._lanes.pages_np[sequence.lane] = -1
        self._lanes.pages_np[sequence.lane, : len(sequence.span.pages)] = sequence.span.pages
        self.running.append(sequence)

    def _withdraw(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        assert sequence.span is not None
        assert not sequence.air.flights, "a lane is freed while a step in the air may write to it"
        self._cache.close(sequence.span)
        self._lanes.give_back(sequence.lane)
        sequence.span, sequence.lane, sequence.air = None, -1, Air()

    def _divide_rows(self) -> list[Work]:
        """Works in order of admission. Rows are counted as if every draft came out as long as allowed."""
        room = self._config.max_step_tokens
        decoding, prefilling = self._sorted()
        seats = max(room - bool(prefilling), 1)
        if len(decoding) > seats:  # take turns
            self._turn = (self._turn + seats) % len(decoding)
            decoding = (decoding[self._turn :] + decoding[: self._turn])[:seats]
        room -= len(decoding)
        prefill = min(sum(sequence.todo for sequence in prefilling), room - room // 2) if prefilling else 0
        drafts = self._governor.draft_lengths(decoding, running=len(self.running), rows=room - prefill)
        works = [
            Work(s, start=s.longest - 1, count=1, samples=True, max_draft=d, drafter=s.drafter)
            for s, d in zip(decoding, drafts, strict=True)
        ]
        return works + self._divide_prefill(prefilling, room - sum(drafts)) if prefilling else works

    def _sorted(self) -> tuple[list[Sequence], list[Sequence]]:
        """Those that decode, and those that have more to compute than their last token."""
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self.running:
            todo = 0 if sequence.is_ending else sequence.todo
            if todo == 1:
                decoding.append(sequence)
            elif todo > 1:
                prefilling.append(sequence)
        return decoding, prefilling

    def _divide_prefill(self, prefilling: list[Sequence], room: int) -> list[Work]:
        counts = fair_split([sequence.todo for sequence in prefilling], room)
        works = []
        for sequence, count in zip(prefilling, counts, strict=True):
            if count:
                assert sequence.span is not None
                start = sequence.span.committed + sequence.air.rows
                works.append(Work(sequence, start=start, count=count, samples=start + count == sequence.longest))
        return works

    def _reserve(self, work: Work, plan: StepPlan) -> bool:
        """Pages for the work, if need be without its draft or at the cost of the latest sequence. False: none left."""
        sequence, end = work.sequence, work.start + work.count
        assert sequence.span is not None
        if end + work.max_draft <= sequence.span.reserved:
            return True
        if work.max_draft and not self._cache.can_reserve(sequence.span, end + work.max_draft):
            work.max_draft, sequence.off = 0, Off(OffKind.NO_PAGE, "no page was free for a draft")
        while not self._cache.can_reserve(sequence.span, end):
            if self.leaving or any(other.air.flights for other in self.running):
                plan.falls_short = True
                return False
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        before = len(sequence.span.pages)
        self._cache.reserve(sequence.span, end + work.max_draft)
        if len(sequence.span.pages) > before:
            self._lanes.pages_np[sequence.lane, before : len(sequence.span.pages)] = sequence.span.pages[before:]
        return True

    def _preempt(self, sequence: Sequence, plan: StepPlan) -> None:
        self._withdraw(sequence)
        sequence.counters.preemptions += 1
        self.waiting.appendleft(sequence)
        plan.preempted.append(sequence)
