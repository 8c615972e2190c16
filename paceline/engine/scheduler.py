"""The scheduler decides which sequences compute how many tokens in the next step. There are no phases: prefill,
decoding and verification are all "compute tokens [a, b) of this sequence", and share one budget of rows.

The budget goes to one row for each decoding sequence first, then to drafts and prefill chunks. Each of the two may use
at least half of the rest, split fairly among sequences, so that a short prompt does not wait for a long one. Beside
decoding sequences, prompts keep to a time: `max_prompt_seconds`, by the measured `ReadingPace`.

Sequences are admitted in the order of `FairQueue`.

When pages run out, drafts are dropped first; then the sequence that was admitted last is preempted, and computed again
later. While steps are in flight no sequence is preempted: the plan `falls_short`, everything lands, and the engine
plans again.

A sequence that ends while in flight keeps its lane and its pages until the last step that may write to them has landed.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from paceline.config import EngineConfig
from paceline.draft import EMPTY, Draft
from paceline.engine.fair_queue import FairQueue
from paceline.engine.gathering import Gathering
from paceline.engine.governor import Governor, fair_split
from paceline.engine.group import Side
from paceline.engine.in_flight import InFlight
from paceline.engine.reading import ReadingPace
from paceline.engine.sequence import Sequence
from paceline.kernels.base import PAGE_SIZE
from paceline.kv.cache import KVCache
from paceline.runner.lanes import Lanes
from paceline.types import Logprob, Off, OffKind, Verdict


@dataclass(slots=True)
class Work:
    """One sequence's part of a step: committed tokens [start, start + count), then a draft if it reaches the end."""

    sequence: Sequence
    start: int
    count: int
    samples: bool  # the last committed token is among the rows, so that the next one can be drawn
    max_draft: int = 0
    drafter: str | None = None  # drafter of this step; the sequence may have changed to another when the step lands
    draft: Draft = EMPTY  # a device keeps its own
    drafted: int = 0  # tokens of the draft; on a device known only when the step has landed
    depth: int = 0  # tokens of the draft's longest path
    forced: bool = False  # the draft comes from the grammar, not from the drafter
    predicted: bool = False  # the draft is what the request predicts
    drafted_from: int = -1  # position of the first token of the host's draft, which may be before the end: see Offer
    first_row: int = 0  # index of the work's first row among those of the pass
    first_out: int = 0  # index of the work's first output among those of the pass
    root: int = 0  # index of the last committed token's output; the outputs of the draft follow
    drawn: bool = False  # the forward pass itself draws the target's tokens
    verdict: Verdict | None = None  # set when the step lands; None: nothing was drawn
    unmasked: bool = False  # a seat of a device's round with a grammar that checks its tokens when they have landed
    void: bool = False  # a seat of a device's round that adds nothing: its mask is not there, or the text was cut
    in_place: bool = False  # the device has moved keys and values of accepted nodes to their positions
    by_network: int = 0  # of `max_draft`, tokens that a device may draft otherwise than by copies of a portfolio
    max_copy: int = 0  # of `max_draft`, tokens that such a copy may have; 0: nobody looks
    sure: int = 0  # tokens of a match from which there is one; 0: never
    copied: bool = False  # the draft was such a copy
    member: str | None = None  # of a portfolio on a device, which has drafted
    tokens: Seq[
        int
    ] = ()  # new tokens, set with the verdict or when they are committed: accepted ones, the target's own
    scores: Seq[Logprob] = ()  # log-probabilities of the new tokens, if the request asks for them
    prompt_scores: Seq[Logprob] = ()  # log-probabilities of the tokens at `start` + 1 and after it, inside the prompt
    states: Tensor | None = None  # [rows, hidden] of the last committed rows, for a request with pooling
    features: Tensor | None = None  # hidden states of the committed rows that a device has sent, for a drafter

    @property
    def decodes(self) -> bool:
        """True if it computes the last committed token alone, and nothing of a prompt."""
        return self.samples and self.count == 1

    @property
    def rows(self) -> int:
        return self.count + self.drafted

    @property
    def outs(self) -> int:
        """Number of committed rows whose logits are wanted; the rows of the draft come on top."""
        return self.count if self.sequence.scores_prompt else int(self.samples)

    def final_rows(self, first: int = 0) -> Seq[int]:
        """Rows that are final after the verdict, counted from `first`: committed tokens, then accepted ones."""
        path: Seq[int] = () if self.verdict is None else self.verdict.path
        drafted = first + self.count
        if self.in_place or not path or path[-1] == len(path) - 1:
            return range(first, drafted + len(path))
        return [*range(first, drafted), *(drafted + node for node in path)]

    @property
    def scored(self) -> int:
        """Number of rows whose next token is one of the prompt that is scored."""
        sequence = self.sequence
        return max(0, min(self.count, sequence.prompt_length - 1 - self.start)) if sequence.scores_prompt else 0

    def go_plain(self, reason: Off) -> None:
        """Ask for no draft in this step, and say why."""
        self.max_draft = self.by_network = self.max_copy = 0
        self.sequence.off = reason


@dataclass(slots=True)
class StepPlan:
    """The works of a step, with their pages reserved."""

    works: list[Work] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)  # sequences that lost their lane
    falls_short: bool = False  # too few pages: land everything and plan again
    depth: int = 0  # steps that stay in flight when the engine's step ends, this one included
    crowded: bool = False  # too many sequences run for any to draft
    decodes: bool = True  # every sequence computes its last token, and nothing of a prompt
    side: Side | None = None  # side of the measured speed-up on which the step counts; None: neither

    @property
    def prompt_rows(self) -> int:
        return sum([work.count for work in self.works if not work.decodes])


class Scheduler:
    def __init__(
        self,
        config: EngineConfig,
        *,
        lanes: Lanes,
        cache: KVCache,
        governor: Governor,
        pace: ReadingPace | None = None,
        knows: Callable[[Sequence, int], bool] = lambda sequence, page: True,
        ready: Callable[[Sequence], bool] = lambda sequence: True,
    ) -> None:
        """`knows` returns whether a sequence can use a page of the prefix cache; if not, the page is computed again.
        `ready` returns whether a sequence that draws with masks can take part in the next step; if not, it is left
        out."""
        self.waiting = FairQueue()
        self.running: list[Sequence] = []  # in order of admission
        self.leaving: list[Sequence] = []  # ended while in flight
        self._config = config
        self._lanes = lanes
        self._cache = cache
        self._governor = governor
        self.pace = pace or ReadingPace()
        self.gathering = Gathering()
        self._knows = knows
        self._ready = ready
        self._turn = 0  # index of the step's first decoding sequence, if there are fewer rows than sequences

    def admit(self) -> list[Sequence]:
        """Give lanes to waiting sequences, as many as lanes and pages allow; returns those that start now."""
        started: list[Sequence] = []
        while self._lanes.free and (sequence := self.waiting.next()) is not None:
            pages = len(sequence.tokens) // PAGE_SIZE + 1
            if (self.running or self.leaving) and not self._cache.pool.can_take(pages):
                break
            self._enter(sequence)
            started.append(sequence)
        return started

    def plan(self) -> StepPlan:
        plan = StepPlan()
        for work in self._divide_rows():
            span = work.sequence.span  # None: a work before it has preempted the sequence
            if span is None:
                continue
            if work.start + work.count + work.max_draft <= len(span.pages) * PAGE_SIZE or self._reserve(work, plan):
                plan.works.append(work)
                plan.decodes = plan.decodes and work.samples and work.count == 1
        plan.crowded = self._governor.crowded
        if self._governor.truth is not None:
            plan.side = self._governor.truth.side
        if plan.preempted:
            plan.works = [work for work in plan.works if work.sequence.lane >= 0]  # a later work may have preempted it
        return plan

    def leave(self, sequence: Sequence) -> None:
        """Free the lane and pages of an ended sequence; if it is in flight, only once its last step has landed."""
        if sequence.lane < 0:
            self.waiting.remove(sequence)
            return
        self.waiting.stop(sequence)
        if sequence.in_flight.steps:
            self.running.remove(sequence)
            self.leaving.append(sequence)
            sequence.in_flight.left = True
        else:
            self._withdraw(sequence)

    def release(self, sequence: Sequence) -> None:
        """Free the lane and pages of a leaving sequence: its last step has landed."""
        self.leaving.remove(sequence)
        self._free(sequence)

    def _enter(self, sequence: Sequence) -> None:
        tokens = np.asarray(sequence.tokens, dtype=np.int32)
        sequence.lane = self._lanes.take()
        sequence.span = self._cache.open(
            tokens,
            salt=sequence.request.cache_salt,
            reuse=sequence.reusable,
            wanted=lambda page: self._knows(sequence, page),
        )
        sequence.counters.cached_tokens += sequence.span.committed
        self._lanes.tokens_np[sequence.lane, : len(tokens)] = tokens
        self._lanes.lengths_np[sequence.lane] = len(tokens)
        self._lanes.pages_np[sequence.lane] = -1
        self._lanes.pages_np[sequence.lane, : len(sequence.span.pages)] = sequence.span.pages
        self.running.append(sequence)
        self.waiting.start(sequence, read=sequence.prompt_length - sequence.span.committed)

    def _withdraw(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        assert sequence.span is not None
        assert not sequence.in_flight.steps, "a lane is freed while a step in flight may write to it"
        self._cache.close(sequence.span)
        self._lanes.give_back(sequence.lane)
        sequence.span, sequence.lane, sequence.in_flight = None, -1, InFlight()

    def _divide_rows(self) -> list[Work]:
        """Divide the rows of a step into works, decoding before prefill. A draft counts with its maximum length."""
        room = self._config.max_step_tokens
        decoding, prefilling = self._sorted()
        if decoding and prefilling and self.gathering.holds(sum([sequence.todo for sequence in prefilling])):
            prefilling = []
        seats = max(room - bool(prefilling), 1)
        if len(decoding) > seats:  # take turns
            self._turn = (self._turn + seats) % len(decoding)
            decoding = (decoding[self._turn :] + decoding[: self._turn])[:seats]
        room -= len(decoding)
        most = self._prompt_rows(prefilling) if decoding and prefilling else room
        prefill = min(sum(sequence.todo for sequence in prefilling), room - room // 2, most) if prefilling else 0
        drafts = self._governor.draft_lengths(
            decoding, running=len(self.running), rows=room - prefill, alone=not prefilling
        )
        works = [
            Work(s, len(s.tokens) + s.in_flight.most - 1, 1, True, d, s.drafter)
            for s, d in zip(decoding, drafts, strict=True)
        ]
        return works + self._divide_prefill(prefilling, min(room - sum(drafts), most)) if prefilling else works

    def _prompt_rows(self, prefilling: list[Sequence]) -> int:
        """Return the rows of prompts for which decoding sequences may wait, by the cost of the longest prompt's."""
        seconds = self._config.max_prompt_seconds
        start = max(sequence.longest - sequence.todo for sequence in prefilling)
        return self.pace.rows(seconds, start=start) if seconds else self._config.max_step_tokens

    def _sorted(self) -> tuple[list[Sequence], list[Sequence]]:
        """Return the ready sequences that decode, and those with more tokens to compute than the last one."""
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self.running:
            state = sequence.in_flight
            if state.least and len(sequence.tokens) + state.least >= sequence.max_length:
                continue  # steps in flight complete it even if they accept no drafted token
            if sequence.caution is not None and sequence.caution.rounds and not self._ready(sequence):
                continue
            todo = 1 if state.most else sequence.todo
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
                start = sequence.span.committed + sequence.in_flight.rows
                works.append(Work(sequence, start=start, count=count, samples=start + count == sequence.longest))
        return works

    def _reserve(self, work: Work, plan: StepPlan) -> bool:
        """Reserve pages for the work; if too few are free, drop its draft, then preempt the sequence admitted last.
        False: no page is left."""
        sequence, end = work.sequence, work.start + work.count
        assert sequence.span is not None
        if work.max_draft and not self._cache.can_reserve(sequence.span, end + work.max_draft):
            work.go_plain(Off(OffKind.NO_PAGE, "no page was free for a draft"))
        while not self._cache.can_reserve(sequence.span, end):
            if self.leaving or any(other.in_flight.steps for other in self.running):
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
        self.waiting.put_back(sequence)
        plan.preempted.append(sequence)
