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
from paceline.engine.governor import Governor
from paceline.engine.judge import COUPLED, judge, rule_of
from paceline.engine.scheduler import StepPlan, Work
from paceline.engine.sequence import Sequence
from paceline.kernels.base import Forward, Output
from paceline.runner.batch import Share, build_batch
from paceline.runner.lanes import Lanes
from paceline.types import Off, OffKind, Verdict

FEW = 32  # tokens that a drafter reads in passing


class HostStep:
    def __init__(
        self,
        forward: Forward,
        *,
        lanes: Lanes,
        drafters: Mapping[str, Guard],
        governor: Governor,
        clock: Callable[[], float],
    ) -> None:
        self._forward = forward
        self._lanes = lanes
        self._drafters = drafters
        self._governor = governor
        self._clock = clock
        # By drafter and sequence: how long it was when last asked for, of those that the drafter was in step with.
        self._asked: dict[tuple[str, int], int] = {}
        self._readers: dict[int, str] = {}  # by sequence: the drafter that reads its hidden states
        self._lost: dict[int, Off] = {}  # sequences whose reader gave them up, and why
        self._columns = {
            name: _columns(guard.taps, forward.taps) for name, guard in drafters.items() if guard.taps
        }  # by drafter: the features that it reads, out of all

    def start(self, sequence: Sequence) -> None:
        for name in sequence.drafters:
            if name in self._drafters:
                self._drafters[name].start(sequence.key, sequence.lane, self._view(sequence))
            if name in self._columns:
                self._readers[sequence.key] = name

    def knows(self, sequence: Sequence, page: int) -> bool:
        """Whether all that draft for the sequence can do without the hidden states of a page that is found again."""
        return all(self._drafters[name].knows(page) for name in sequence.drafters if name in self._columns)

    def stop(self, sequence: Sequence) -> None:
        self._readers.pop(sequence.key, None)
        self._lost.pop(sequence.key, None)
        for name in sequence.drafters:
            self._asked.pop((name, sequence.key), None)
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
            elif work.max_draft and name in self._columns and work.sequence.key in self._lost:
                work.max_draft, work.sequence.off = 0, self._lost[work.sequence.key]
            elif work.max_draft and name in self._drafters:
                asking.setdefault(name, []).append(work)
            elif work.max_draft:
                work.max_draft = 0
                work.sequence.off = Off(OffKind.HOST_STEP, f"drafter {name} runs on the device, this step does not")
        for name, works in asking.items():
            began, price = self._clock(), self._governor.price(name)
            drafts = self._drafters[name].propose([self._ask(work, price) for work in works])
            in_step = [self._is_in_step(name, work.sequence) for work in works]
            if all(in_step):
                tokens, depth = sum(map(len, drafts)), sum(draft.depth for draft in drafts)
                self._governor.cost.observe_draft(name, tokens=tokens, depth=depth, seconds=self._clock() - began)
            for work, draft, knew in zip(works, drafts, in_step, strict=True):
                self._attach(work, draft)
                if draft or knew:
                    self._asked[name, work.sequence.key] = len(work.sequence.tokens)

    def _is_in_step(self, name: str, sequence: Sequence) -> bool:
        """False: a drafter may have read a long text before this draft, which says nothing of the next one."""
        last = self._asked.get((name, sequence.key))
        return last is not None and len(sequence.tokens) - last <= FEW

    def _forced(self, work: Work) -> tuple[int, ...]:
        grammar = work.sequence.sampler.grammar
        return grammar.forced(work.max_draft) if grammar is not None and work.max_draft else ()

    def _attach(self, work: Work, draft: Draft) -> None:
        work.draft = draft
        self._lanes.write(work.sequence.lane, len(work.sequence.tokens), draft.tokens)

    def verify(self, plan: StepPlan) -> Output:
        shares, first_out = [], 0
        for work in plan.works:
            sampler, outs = work.sequence.sampler, work.outs
            # The pass draws only after drafts that were drawn themselves, which other rules do not go by.
            work.drawn = sampler.is_simple and rule_of(work) is COUPLED
            inverse_temperature = sampler.inverse_temperature if work.drawn else 0.0
            share = Share(
                work.sequence.lane, work.start, work.count, work.draft, outs, sampler.seed, inverse_temperature
            )
            shares.append(share)
            work.first_out, work.root = first_out, first_out + outs - 1
            first_out += outs + len(work.draft.tokens)
        features = any(work.sequence.key in self._readers for work in plan.works)
        return self._forward(build_batch(self._lanes, shares, features=features))

    def accept(self, plan: StepPlan, output: Output) -> dict[int, Verdict]:
        works = plan.works if plan.decodes else [work for work in plan.works if work.samples]
        return judge(works, output, self._forward.pick)

    def feed(self, plan: StepPlan, verdicts: Mapping[int, Verdict], output: Output) -> None:
        """Hand the hidden states of what was committed to the drafters that read them."""
        if output.features is None:
            return
        seen: dict[str, list[Seen]] = {}
        row = 0
        for work in plan.works:
            first, row, sequence = row, row + work.rows, work.sequence
            name = self._readers.get(sequence.key)
            if name is not None and sequence.finish is None:
                verdict = verdicts.get(sequence.key)
                rows = final_rows(work.count, verdict.path if verdict else (), first=first)
                seen.setdefault(name, []).append(Seen(sequence.key, work.start, rows))
        for name, parts in seen.items():
            lost = self._drafters[name].feed(self._columns[name](output.features), parts, crowded=plan.crowded)
            self._lost |= lost
            unread = lost if self._drafters[name].out is None else [each.key for each in parts]
            for key in unread:
                del self._readers[key]

    def _view(self, sequence: Sequence) -> np.ndarray:
        """The committed tokens, read-only: drafters are not trusted."""
        return self._lanes.view(sequence.lane, len(sequence.tokens))

    def _ask(self, work: Work, price: float) -> Ask:
        sequence = work.sequence
        return Ask(
            key=sequence.key,
            lane=sequence.lane,
            tokens=self._view(sequence),
            max_draft=work.max_draft,
            sampler=sequence.sampler,
            rule=sequence.request.speculation.rule,
            p_min=sequence.request.speculation.p_min,
            price=price,
            row_price=self._governor.row_price,
            left=sequence.max_length - len(sequence.tokens),
            predicted=() if sequence.trail is None else sequence.trail.ahead(work.max_draft),
        )


def final_rows(count: int, path: Seq[int], *, first: int = 0) -> Seq[int]:
    """The rows of a work that are final: its `count` committed tokens, and the accepted ones of its draft."""
    if not path or path[-1] == len(path) - 1:
        return range(first, first + count + len(path))
    return [*range(first, first + count), *(first + count + node for node in path)]


def _columns(wanted: Seq[int], kept: Seq[int]) -> Callable[[Tensor], Tensor]:
    """From the features at all taps of a pass to those at the `wanted` ones."""
    if list(wanted) == list(kept):
        return lambda features: features
    places = [kept.index(tap) for tap in wanted]
    return lambda features: torch.cat([features.chunk(len(kept), dim=1)[place] for place in places], dim=1)
