"""Decides who drafts how long in a step, and says why where nobody does.

Three things limit a draft: what the user set, the sequence's own pace, and what a drafted token costs on this machine
(`engine.cost`) against how likely it is right. Where a device knows how long its rounds take, that decides instead of
the last: the length from which all together get the most tokens a second, which may be none. The scheduler only asks
`draft_lengths`; the engine only reports, drafts to `learn` and times to `cost`.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from statistics import linear_regression

from paceline.config import EngineConfig
from paceline.drafters.guard import Guard
from paceline.engine.cost import CostModel
from paceline.engine.pace import Pace
from paceline.engine.sequence import Sequence
from paceline.runner.rounds.protocol import Rounds
from paceline.types import Off, OffKind

# What drafters that end their drafts themselves are told until it is measured, about that of a small model on a CPU.
# With nothing to go by all drafts would be as long as may be, and drafts of one length teach nothing of a row's cost.
PRIOR_PRICE, PRIOR_ROW_PRICE = 0.12, 0.06


class Governor:
    def __init__(
        self, config: EngineConfig, drafters: Mapping[str, Guard], *, max_context: int, rounds: Rounds | None = None
    ) -> None:
        self.cost = CostModel()
        self._config = config
        self._drafters = drafters
        self._max_context = max_context
        self._rounds = rounds

    def draft_lengths(self, sequences: Seq[Sequence], *, running: int, rows: int) -> list[int]:
        """Longest draft worth asking for, one a sequence, of at most `rows` tokens in all; leaves the reason in
        `off` where it is 0."""
        seconds = self._round_seconds(sequences)
        wishes = [self._wish(sequence, running, by_cost=sequence.drafter not in seconds) for sequence in sequences]
        for drafter, known in seconds.items():
            wishes = self._within_a_round(sequences, wishes, drafter, known)
        total = min(rows, self._config.max_draft_tokens)
        lengths = fair_split(wishes, total)
        for sequence, wish, length in zip(sequences, wishes, lengths, strict=True):
            if wish and not length:
                detail = f"no room: {total} drafted tokens in a step of {len(wishes)} decoding sequences"
                sequence.off = Off(OffKind.NO_ROOM, detail)
        return lengths

    def price(self, drafter: str) -> float:
        """How likely one more token must be right to be worth drafting; 0 where nobody asks what it costs."""
        return (self.cost.price(drafter) or PRIOR_PRICE) if self._asks_what_it_costs else 0.0

    @property
    def row_price(self) -> float:
        """The same where only verifying it costs anything."""
        return (self.cost.row_price or PRIOR_ROW_PRICE) if self._asks_what_it_costs else 0.0

    @property
    def _asks_what_it_costs(self) -> bool:
        return self._config.measure_cost and not self._config.fixed_draft

    def learn(self, sequence: Sequence, *, drafter: str | None, drafted: int, accepted: int) -> None:
        if not self._config.fixed_draft:
            output = len(sequence.tokens) - sequence.prompt_length
            sequence.pace_with(drafter).learn(drafted, accepted, output_tokens=output, config=self._config)

    def _wish(self, sequence: Sequence, running: int, *, by_cost: bool) -> int:
        useful, drafter = self._useful(sequence), sequence.drafter
        if useful > 0 and (forced := self._forced(sequence, running, useful)):
            return forced
        if drafter is None or useful <= 0:
            return 0
        sequence.off = self._reason_against(sequence, running)
        if sequence.off is not None:
            return 0
        limit = min(useful, self._config.max_draft, self._longest(drafter))
        if sequence.request.speculation.max_draft is not None:
            limit = min(limit, sequence.request.speculation.max_draft)
        return limit if self._config.fixed_draft else self._sensible(sequence, limit, by_cost=by_cost)

    def _sensible(self, sequence: Sequence, limit: int, *, by_cost: bool) -> int:
        """At most `limit`: what the sequence's pace allows and what pays, where the drafter does not see to it."""
        guard, pace = self._drafters.get(sequence.drafter or ""), sequence.pace
        ends_drafts = guard is not None and guard.ends_drafts
        if not ends_drafts:
            limit = min(limit, pace.length)
        affordable = self._affordable(sequence, pace) if by_cost and self._config.measure_cost else None
        return limit if affordable is None or (affordable and ends_drafts) else min(limit, affordable)

    def _forced(self, sequence: Sequence, running: int, useful: int) -> int:
        """How many tokens the grammar leaves no choice of: they need no drafter, and no proof that they pay."""
        grammar, speculation = sequence.sampler.grammar, sequence.request.speculation
        if grammar is None or not speculation.enabled or running > self._config.max_draft_batch:
            return 0
        return len(grammar.forced(min(useful, self._config.max_draft, speculation.max_draft or useful)))

    def _useful(self, sequence: Sequence) -> int:
        """The longest draft that could matter: a round gives one token more than it accepts, so the last token allowed
        never needs a draft. With steps in flight, one that matters if they bring as little as they can, and that
        stays inside the lane, which has room for a draft beyond the context, if they bring all."""
        needed = sequence.max_length - len(sequence.tokens) - sequence.in_flight.least - 1
        return min(needed, self._max_context + self._config.max_draft - sequence.longest)

    def _longest(self, drafter: str) -> int:
        guard = self._drafters.get(drafter)
        if self._rounds is None or drafter not in self._rounds.drafters:
            return self._drafters[drafter].max_draft
        return self._rounds.max_draft if guard is None else min(guard.max_draft, self._rounds.max_draft)

    def _round_seconds(self, sequences: Seq[Sequence]) -> dict[str, list[float]]:
        """By drafter: seconds of its rounds for drafts of 0, 1, … tokens. None of a drafter with nothing to go by."""
        if self._rounds is None or self._config.fixed_draft or not self._config.measure_cost:
            return {}
        drafters = dict.fromkeys(sequence.drafter for sequence in sequences if sequence.drafter is not None)
        if not drafters.keys() <= {*self._rounds.drafters}:
            return {}
        tables = {drafter: self._table(drafter, batch=len(sequences)) for drafter in drafters}
        return {drafter: table for drafter, table in tables.items() if table}

    def _table(self, drafter: str, *, batch: int) -> list[float]:
        """Where not measured, on a line; empty: too little is known for one."""
        assert self._rounds is not None
        lengths = range(min(self._config.max_draft, self._rounds.max_draft) + 1)
        measured = [self._rounds.round_seconds(batch, length, drafter) for length in lengths]
        known = [(length, seconds) for length, seconds in enumerate(measured) if seconds is not None]
        if len(known) < 2:
            return []
        slope, base = linear_regression(*zip(*known, strict=True))
        least = min(seconds for _, seconds in known) / 2  # no line may promise rounds for nothing
        return [max(base + slope * i, least) if seconds is None else seconds for i, seconds in enumerate(measured)]

    def _within_a_round(
        self, sequences: Seq[Sequence], wishes: list[int], drafter: str, seconds: Seq[float]
    ) -> list[int]:
        """Cut the wishes of those whom `drafter` serves to the length with the most tokens a second; in its rounds the
        others go plain. Where that is none they pause, and probe after it, one draft at a time, unless not even right
        drafts would pay."""
        own = [wish if s.drafter == drafter else 0 for s, wish in zip(sequences, wishes, strict=True)]
        drafts = [(sequence.pace.rate, wish) for sequence, wish in zip(sequences, own, strict=True)]
        best = _best_length(drafts, seconds)
        hopeless = not best and not _best_length([(1.0, wish) for wish in own], seconds)
        cut = list(wishes)
        for i, (sequence, wish) in enumerate(zip(sequences, own, strict=True)):
            if not wish:
                continue
            if best:
                cut[i] = min(wish, best)
            elif hopeless or not sequence.pace.probing:
                cut[i] = 0
                self._pause(sequence, Off(OffKind.PLAIN_FASTER, "paused: plain rounds make more tokens a second"))
            elif sequence.in_flight.most != sequence.in_flight.least:  # the last probe has not landed
                cut[i] = 0
        return cut

    def _affordable(self, sequence: Sequence, pace: Pace) -> int | None:
        """The longest draft that pays; where none does the sequence pauses, and says why."""
        drafter = sequence.drafter or ""
        entry = self.cost.entry(drafter)
        length = pace.affordable(entry=entry, price=self.cost.price(drafter))
        if length == 0:
            detail = f"paused: a drafted token was right with {pace.rate:.0%}, with {entry:.0%} it would pay"
            self._pause(sequence, Off(OffKind.WOULD_NOT_PAY, detail))
        return length

    def _pause(self, sequence: Sequence, reason: Off) -> None:
        output_tokens = len(sequence.tokens) - sequence.prompt_length
        sequence.pace.pause(reason, output_tokens=output_tokens, tokens=self._config.pause_tokens // 4 + 1)
        sequence.off = reason

    def _reason_against(self, sequence: Sequence, running: int) -> Off | None:
        config, drafter = self._config, self._drafters.get(sequence.drafter or "")
        if drafter is not None and drafter.out is not None:
            return Off(OffKind.DRAFTER_OUT, drafter.out)
        if running > config.max_draft_batch:
            return Off(OffKind.BATCH, f"{running} sequences run, more than max_draft_batch {config.max_draft_batch}")
        length, longest = len(sequence.tokens), config.max_draft_context
        if length > longest:
            return Off(OffKind.CONTEXT, f"{length} tokens of context, more than max_draft_context {longest}")
        if not config.fixed_draft and sequence.pace.paused(len(sequence.tokens) - sequence.prompt_length):
            return sequence.pace.reason
        return None


def _best_length(drafts: Seq[tuple[float, int]], seconds: Seq[float]) -> int:
    """The draft length with the most tokens a second, where nobody drafts more; `drafts`: (how likely a token is right,
    longest draft) of each sequence."""

    def tokens(length: int) -> float:
        return sum(sum(rate**i for i in range(min(wish, length) + 1)) for rate, wish in drafts)

    return max(range(max(wish for _, wish in drafts) + 1), key=lambda length: tokens(length) / seconds[length])


def fair_split(wishes: Seq[int], total: int) -> list[int]:
    """Give each what it wishes as far as `total` goes; where it does not, nobody gets more than a bigger wisher."""
    if sum(wishes) <= total:
        return list(wishes)
    shares = [0] * len(wishes)
    order = sorted(range(len(wishes)), key=lambda i: wishes[i])
    for place, i in enumerate(order):
        shares[i] = min(wishes[i], total // (len(order) - place))
        total -= shares[i]
    return shares
