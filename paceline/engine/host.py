"""The host's stepper: draft, verify and accept on the host, with any drafter, rule and sampling parameter.

A step is complete when `launch` returns; `land` only hands out its outcome.
"""

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
from paceline.engine.stepper import Landing
from paceline.kernels.base import Forward, Output
from paceline.runner.batch import Share, build_batch
from paceline.runner.lanes import Lanes
from paceline.runner.rounds.protocol import Times
from paceline.types import Off, OffKind

PASSING_TOKENS = 32  # new tokens that a drafter reads along with a draft without distorting the draft's measured cost


class HostStepper:
    """Implements Stepper."""

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
        self._landing: Landing | None = None  # outcome of the step that was launched; None: no step in flight
        self._crowded = False  # too many sequences ran in that step for any to draft
        # (drafter, sequence) → length of the sequence when the drafter last drafted or had read all of it
        self._asked: dict[tuple[str, int], int] = {}
        self._readers: dict[int, str] = {}  # sequence → the drafter that reads its hidden states
        self._lost: dict[int, Off] = {}  # sequence → why its reader can no longer draft for it
        self._columns = {
            name: _columns(guard.taps, forward.taps) for name, guard in drafters.items() if guard.taps
        }  # drafter → function that selects its taps from the features of all taps

    @property
    def in_flight(self) -> int:
        return self._landing is not None

    def depth(self, running: Seq[Sequence]) -> int:
        return 0

    def ready(self, sequence: Sequence) -> bool:
        return True

    def launch(self, plan: StepPlan) -> None:
        if not plan.works:
            return
        clock = self._clock
        began = clock()
        self._draft(plan)
        drafted = clock()
        output = self._verify(plan)
        verified = clock()
        self._accept(plan, output)
        times = Times(draft=drafted - began, verify=verified - drafted, accept=clock() - verified)
        self._landing = Landing(plan.works, times, decodes=plan.decodes, output=output, inside=True)
        self._crowded = plan.crowded

    def land(self) -> Landing:
        landing, self._landing = self._landing, None
        assert landing is not None, "no step was launched"
        return landing

    def abandon(self, sequences: Seq[Sequence]) -> None:
        self._landing = None

    def observe(self, landing: Landing) -> None:
        for work in landing.works:
            if work.draft and not work.forced and work.verdict is not None and work.sequence.finish is None:
                drafter, sequence = self._drafters[work.drafter or ""], work.sequence
                drafter.observe(sequence.key, self._view(sequence), len(work.verdict.path))
        if landing.output is not None and landing.output.features is not None:
            self._feed(landing.works, landing.output.features)

    def start(self, sequence: Sequence) -> None:
        for name in sequence.drafters:
            if name in self._drafters:
                self._drafters[name].start(sequence.key, sequence.lane, self._view(sequence))
            if name in self._columns:
                self._readers[sequence.key] = name

    def knows(self, sequence: Sequence, page: int) -> bool:
        """True if no drafter of the sequence needs hidden states of this page that it does not have."""
        return all(self._drafters[name].knows(page) for name in sequence.drafters if name in self._columns)

    def stop(self, sequence: Sequence) -> None:
        self._readers.pop(sequence.key, None)
        self._lost.pop(sequence.key, None)
        for name in sequence.drafters:
            self._asked.pop((name, sequence.key), None)
            if name in self._drafters:
                self._drafters[name].stop(sequence.key)

    def _draft(self, plan: StepPlan) -> None:
        """Ask each drafter once for all its sequences, and write the drafts behind the committed tokens. Tokens that a
        grammar forces are a draft of their own, without a drafter."""
        asking: dict[str, list[Work]] = {}
        for work in plan.works:
            name = work.drafter or ""
            if forced := self._forced(work):
                work.forced = True
                self._attach(work, Draft(tokens=forced))
            elif work.max_draft and name in self._columns and work.sequence.key in self._lost:
                work.go_plain(self._lost[work.sequence.key])
            elif work.max_draft and name in self._drafters:
                asking.setdefault(name, []).append(work)
            elif work.max_draft:
                work.go_plain(Off(OffKind.HOST_STEP, f"drafter {name} runs on the device, this step does not"))
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
        """Return True if the drafter had few new tokens to read; only then the draft's time is typical and learnt."""
        last = self._asked.get((name, sequence.key))
        return last is not None and len(sequence.tokens) - last <= PASSING_TOKENS

    def _forced(self, work: Work) -> tuple[int, ...]:
        grammar = work.sequence.sampler.grammar
        return grammar.forced(work.max_draft) if grammar is not None and work.max_draft else ()

    def _attach(self, work: Work, draft: Draft) -> None:
        work.draft = draft
        self._lanes.write(work.sequence.lane, len(work.sequence.tokens), draft.tokens)

    def _verify(self, plan: StepPlan) -> Output:
        shares, first_out, first_row = [], 0, 0
        for work in plan.works:
            sampler, outs = work.sequence.sampler, work.outs
            # The pass itself draws only for the coupled rule: other rules may accept a path that it did not draw.
            work.drawn = sampler.is_simple and rule_of(work) is COUPLED
            inverse_temperature = sampler.inverse_temperature if work.drawn else 0.0
            share = Share(
                work.sequence.lane, work.start, work.count, work.draft, outs, sampler.seed, inverse_temperature
            )
            shares.append(share)
            work.first_row, first_row = first_row, first_row + work.rows
            work.first_out, work.root = first_out, first_out + outs - 1
            first_out += outs + len(work.draft.tokens)
        features = any(work.sequence.key in self._readers for work in plan.works)
        states = any(work.sequence.pool is not None for work in plan.works)
        return self._forward(build_batch(self._lanes, shares, features=features, states=states))

    def _accept(self, plan: StepPlan, output: Output) -> None:
        works = plan.works if plan.decodes else [work for work in plan.works if work.samples]
        verdicts = judge(works, output, self._forward.pick)
        for work in works:
            work.verdict = verdicts[work.sequence.key]

    def _feed(self, works: Seq[Work], features: Tensor) -> None:
        """Hand the hidden states of committed rows to the drafters that read them."""
        seen: dict[str, list[Seen]] = {}
        for work in works:
            sequence = work.sequence
            name = self._readers.get(sequence.key)
            if name is not None and sequence.finish is None:
                seen.setdefault(name, []).append(Seen(sequence.key, work.start, work.final_rows(work.first_row)))
        for name, parts in seen.items():
            lost = self._drafters[name].feed(self._columns[name](features), parts, crowded=self._crowded)
            self._lost |= lost
            unread = lost if self._drafters[name].out is None else [each.key for each in parts]
            for key in unread:
                del self._readers[key]

    def _view(self, sequence: Sequence) -> np.ndarray:
        """Return the committed tokens of a sequence, read-only: drafters are not trusted."""
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


def _columns(wanted: Seq[int], kept: Seq[int]) -> Callable[[Tensor], Tensor]:
    """Return a function that selects the columns of the `wanted` taps from features of all `kept` taps."""
    if list(wanted) == list(kept):
        return lambda features: features
    places = [kept.index(tap) for tap in wanted]
    return lambda features: torch.cat([features.chunk(len(kept), dim=1)[place] for place in places], dim=1)
