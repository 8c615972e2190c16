"""The measured speed-up: a small share of steps is drawn to run plain, and compared with the steps around them.

Under the coupled rule, and for greedy requests under any exact one, text does not depend on drafts. So a step can run
plain at any time, and the speed of the engine without speculation is measured. Steps are drawn in short runs at random
distances. The first step of a run counts nowhere: drafts before it may still show in its time.

    speculative ········ │ plain: 1 of no use, the others count │ ········ speculative ········ │ plain …
    ────────────────────────── a block ───────────────────────────────────── the next block ─────────────

Everything else is the speculative side, also steps that chose to draft nothing: the question is what leaving it on
brings. Steps are grouped by drafter, batch size, and whether tokens are sampled (`engine.group`): fewer drafts are
right where they are. Each group has a ratio and a guard.
While a group must not draft, drafters that copy still draft what is sure; such steps are a group of their own.

It never changes a text, and never draws a step with a request whose text depends on drafts. It reads no clock.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq

from paceline.engine.group import Group, Side
from paceline.engine.sequence import Sequence
from paceline.engine.stats import Measurement
from paceline.types import Off, Speedup

NOT_MEASURED = None, "not measured: measure_speedup is off, or no drafter is loaded"
PRIOR_STEPS = 16  # steps after which a group that waits asks again whether drafts are expected to pay
SEED = 20  # of the draws: two engines with the same steps draw the same ones


class Truth:
    def __init__(
        self,
        *,
        guards: bool,
        prior: Callable[[int], Off | None] = lambda sequences: None,
        copies: Callable[[str], bool] = lambda drafter: False,
    ) -> None:
        """`guards`: drafting is turned off where it makes steps slower. `prior`: why steps with so many sequences must
        not draft before this was measured; None: they may. `copies`: whether a drafter looks tokens up."""
        self.guarded: Off | None = None  # why the latest step must not draft; None: it may
        self.copies_only = False  # copies may be drafted although it must not draft
        self.side: Side | None = None  # side that the latest step counts on; None: nowhere
        self.drawn = 0  # steps that were drawn
        self.steps = 0  # steps with a drafter, drawn or not
        self._guards = guards
        self._prior = prior
        self._copies = copies
        self._generator = random.Random(SEED)
        self._groups: dict[tuple[str, int, bool], Group] = {}
        self._latest: Group | None = None  # group of the latest step that had a drafter; None: it must not be drawn

    def draws(self, sequences: Seq[Sequence], *, alone: bool) -> bool:
        """Count a step, and return whether it is drawn to run plain. `alone`: no prompt is read in it.

        Sets `side`, `guarded` and `copies_only` of the step."""
        self.guarded = self.side = None
        group = self._group_of(sequences)
        if group is None:
            self.guarded = self._prior(len(sequences))
            self.copies_only = self.guarded is not None
            return False
        self.steps += 1
        if group.waits and self.steps % PRIOR_STEPS == 0 and self._prior(group.most) is None:
            group.begin()
        if group.off is not None:
            self.guarded = group.rest()
            if self.guarded is None or (group := group.resting()) is None:
                self.copies_only = False
                return False
            self._latest = group
        self.copies_only = self.guarded is not None
        if not alone:
            return False
        place = group.draw(self.steps)
        self.side = group.side_of(place)
        self.drawn += place > 0
        return place > 0

    def _group_of(self, sequences: Seq[Sequence]) -> Group | None:
        """Find the group of a step. None: nobody drafts in it, or it must not be drawn."""
        names, sampled = set(), False
        for sequence in sequences:
            if not sequence.drawable:
                self._latest = None
                return None
            names.add(sequence.drafting)
            sampled = sampled or sequence.sampled
        names.discard("")
        if not names:
            return None
        name = " and ".join(sorted(names))
        key = name, (len(sequences) - 1).bit_length(), sampled
        group = self._groups.get(key)
        if group is None:
            copies = any(self._copies(drafter) for each in names for drafter in each.split("+"))
            group = self._groups[key] = Group(
                name, key[1], sampled=sampled, guards=self._guards, generator=self._generator, copies=copies
            )
            if (off := self._prior(group.most)) is not None:
                group.wait(off)
        self._latest = group
        return group

    @property
    def plain_seconds(self) -> float:
        """Seconds of a plain step with about as many sequences as the latest one; 0: not measured."""
        return 0.0 if self._latest is None else self._latest.plain_seconds

    def of(self, sequence: Sequence) -> tuple[Speedup | None, str | None]:
        """Return the speed-up that was measured for steps like the latest one of a sequence, or why there is none."""
        if not sequence.drafting:
            return None, "not measured: the request does not speculate"
        if not sequence.drawable:
            rule = sequence.request.speculation.rule
            return None, f"not measured: under the rule {rule} the text depends on what is drafted"
        if self._latest is None:
            return None, "not measured: the text of another sequence in the batch depends on what is drafted"
        found, off = self._latest.state.speedup, self._latest.off
        return found, None if found is not None else "measuring" if off is None else off.detail

    def forget(self, drafter: str) -> None:
        """Forget the groups of a drafter that was unloaded, alone or beside others."""
        self._groups = {key: group for key, group in self._groups.items() if drafter not in key[0].split(" and ")}
        self._latest = None

    def measurement(self) -> Measurement:
        groups = tuple(group.state for group in self._all())
        return Measurement(speedup=self.overall(), groups=groups, steps=self.steps, drawn=self.drawn)

    def _all(self) -> list[Group]:
        groups = self._groups.values()
        return [*groups, *(group.copies for group in groups if group.copies is not None)]

    def overall(self) -> Speedup | None:
        """Return the speed-up over all groups in which drafting is on, weighted by the time that each took lately: what
        a group made in T seconds would have taken ratio · T seconds plainly."""
        known = [(g.weight(self.steps), g.state.speedup) for g in self._all() if g.off is None]
        pairs = [(weight, found) for weight, found in known if found is not None and weight > 0]
        total = sum(weight for weight, _ in pairs)
        if not total:
            return None
        ratio = sum(weight * found.ratio for weight, found in pairs) / total
        below = math.hypot(*(weight * (found.ratio - found.low) for weight, found in pairs)) / total
        above = math.hypot(*(weight * (found.high - found.ratio) for weight, found in pairs)) / total
        return Speedup(ratio, ratio - below, ratio + above)
