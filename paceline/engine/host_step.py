"""Draft, verify and accept with the host in between: any drafter, any rule, any sampling parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from paceline.draft import Draft
from paceline.drafters.base import Ask
from paceline.drafters.guard import Guard
from paceline.engine.cost import CostModel
from paceline.engine.judge import judge
from paceline.engine.scheduler import StepPlan, Work
from paceline.engine.sequence import Sequence
from paceline.kernels.base import Forward, Output
from paceline.runner.batch import Share, build_batch
from paceline.runner.lanes import Lanes
from paceline.types import Verdict


class HostStep:
    def __init__(
        self,
        forward: Forward,
        *,
        lanes: Lanes,
        drafters: Mapping[str, Guard],
        cost: CostModel,
        clock: Callable[[], float],
    ) -> None:
        self._forward = forward
        self._lanes = lanes
        self._drafters = drafters
        self._cost = cost
        self._clock = clock
        self._begun: set[int] = set()  # sequences that their drafter has drafted for

    def start(self, sequence: Sequence) -> None:
        if sequence.drafter is not None and sequence.drafter in self._drafters:
            self._drafters[sequence.drafter].start(sequence.key, sequence.lane, self._view(sequence))

    def stop(self, sequence: Sequence) -> None:
        self._begun.discard(sequence.key)
        if sequence.drafter is not None and sequence.drafter in self._drafters:
            self._drafters[sequence.drafter].stop(sequence.key)

    def observe(self, work: Work, verdict: Verdict) -> None:
        """Tell the drafter what became of its draft, where the sequence goes on."""
        sequence = work.sequence
        if work.draft and not work.forced and sequence.finish is None:
            drafter = self._drafters[sequence.drafter or ""]
            drafter.observe(sequence.key, self._view(sequence), len(verdict.path))

    def draft(self, plan: StepPlan) -> None:
        """Ask each drafter once for all its sequences, and put the drafts behind the committed tokens. Where a grammar
        leaves no choice, nobody is asked."""
        asking: dict[str, list[Work]] = {}
        for work in plan.works:
            name = work.sequence.drafter or ""
            if forced := self._forced(work):
                work.forced = True
                self._attach(work, Draft(tokens=forced))
            elif work.max_draft and name in self._drafters:
                asking.setdefault(name, []).append(work)
            elif work.max_draft:
                work.max_draft, work.sequence.off_reason = 0, f"drafter {name} runs on the device, this step does not"
        for name, works in asking.items():
            began = self._clock()
            drafts = self._drafters[name].propose([self._ask(work) for work in works])
            if all(work.sequence.key in self._begun for work in works):  # else a drafter may have read a whole prompt
                drafted = sum(map(len, drafts))
                self._cost.observe_draft(name, tokens=drafted, seconds=self._clock() - began)
            for work, draft in zip(works, drafts, strict=True):
                self._attach(work, draft)
                if draft:
                    self._begun.add(work.sequence.key)

    def _forced(self, work: Work) -> tuple[int, ...]:
        grammar = work.sequence.sampler.grammar
        return grammar.forced(work.max_draft) if grammar is not None and work.max_draft else ()

    def _attach(self, work: Work, draft: Draft) -> None:
        work.draft = draft
        length = len(work.sequence.tokens)
        self._lanes.tokens_np[work.sequence.lane, length : length + len(draft)] = draft.tokens

    def verify(self, plan: StepPlan) -> Output:
        shares, first_out = [], 0
        for work in plan.works:
            shares.append(Share(work.sequence.lane, work.start, work.count, work.draft, work.outs))
            work.first_out = first_out
            first_out += work.outs + len(work.draft)
        return self._forward(build_batch(self._lanes, shares))

    def accept(self, plan: StepPlan, output: Output) -> dict[int, Verdict]:
        return judge([work for work in plan.works if work.samples], output, self._forward.pick)

    def _view(self, sequence: Sequence) -> np.ndarray:
        """The committed tokens, read-only: drafters are not trusted."""
        view = self._lanes.tokens_np[sequence.lane, : len(sequence.tokens)]
        view.flags.writeable = False
        return view

    def _ask(self, work: Work) -> Ask:
        sequence = work.sequence
        return Ask(
            key=sequence.key,
            lane=sequence.lane,
            tokens=self._view(sequence),
            max_draft=work.max_draft,
            sampler=sequence.sampler,
            rule=sequence.request.speculation.rule,
            p_min=sequence.request.speculation.p_min,
        )
