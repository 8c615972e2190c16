"""Draft, verify and accept with the host in between: any drafter, any rule, any sampling parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from paceline.draft import Draft
from paceline.drafters.base import Ask, Seen
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
        self._begun: set[tuple[str, int]] = set()  # drafters, and sequences that each has drafted for
        self._columns = {
            name: _columns(guard.taps, forward.taps) for name, guard in drafters.items() if guard.taps
        }  # by drafter: the features that it reads, out of all

    def start(self, sequence: Sequence) -> None:
        for name in sequence.drafters:
            if name in self._drafters:
                self._drafters[name].start(sequence.key, sequence.lane, self._view(sequence))

    def knows(self, sequence: Sequence, page: int) -> bool:
        """Whether all that draft for the sequence can do without the hidden states of a page that is found again."""
        return all(self._drafters[name].knows(page) for name in sequence.drafters if name in self._columns)

    def stop(self, sequence: Sequence) -> None:
        for name in sequence.drafters:
            self._begun.discard((name, sequence.key))
            if name in self._drafters:
                self._drafters[name].stop(sequence.key)

    def observe(self, work: Work, verdict: Verdict) -> None:
        """Tell the drafter what became of its draft, where the sequence goes on."""
        sequence = work.sequence
        if work.draft and not work.forced and sequence.finish is None:
            drafter = self._drafters[work.drafter or ""]
            drafter.observe(sequence.key, self._view(sequence), len(verdict.path))

    def draft(self, plan: StepPlan) -> None:
        """Ask each drafter once for all its sequences, and put the drafts behind the committed tokens. Where a grammar
        leaves no choice, nobody is asked."""
        asking: dict[str, list[Work]] = {}
        for work in plan.works:
            name = work.drafter or ""
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
            if all(
                (name, work.sequence.key) in self._begun for work in works
            ):  # else a drafter may have read a whole prompt
                drafted = sum(map(len, drafts))
                self._cost.observe_draft(name, tokens=drafted, seconds=self._clock() - began)
            for work, draft in zip(works, drafts, strict=True):
                self._attach(work, draft)
                if draft:
                    self._begun.add((name, work.sequence.key))

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

    def feed(self, plan: StepPlan, verdicts: Mapping[int, Verdict], output: Output) -> None:
        """Hand the hidden states of what was committed to the drafters that read them."""
        if output.features is None:
            return
        seen: dict[str, list[Seen]] = {}
        row = 0
        for work in plan.works:
            first, row = row, row + work.rows
            name = next((name for name in work.sequence.drafters if name in self._columns), None)
            if work.sequence.finish is None and name is not None:
                verdict = verdicts.get(work.sequence.key)
                rows = _committed(output.features, first, work.count, verdict.path if verdict else ())
                seen.setdefault(name, []).append(Seen(work.sequence.key, work.start, self._columns[name](rows)))
        for name, each in seen.items():
            self._drafters[name].feed(each)

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
            predicted=() if sequence.trail is None else sequence.trail.ahead(work.max_draft),
        )


def _committed(features: Tensor, first: int, count: int, path: Seq[int]) -> Tensor:
    """The rows of a work that are final, of all: those of committed tokens, and the accepted ones of its draft."""
    if not path or path[-1] == len(path) - 1:
        return features[first : first + count + len(path)]
    return features[[*range(first, first + count), *(first + count + node for node in path)]]


def _columns(wanted: Seq[int], kept: Seq[int]) -> Callable[[Tensor], Tensor]:
    """From the features at all taps of a pass to those at the `wanted` ones."""
    if list(wanted) == list(kept):
        return lambda features: features
    places = [kept.index(tap) for tap in wanted]
    return lambda features: torch.cat([features.chunk(len(kept), dim=1)[place] for place in places], dim=1)
