"""The governor decides how many tokens each sequence drafts in a step, and says why a sequence drafts none.

Three things limit a draft: the user's settings, the sequence's own pace, and the cost of a drafted token on this
machine (`engine.cost`) compared with its probability of being right. If a device has measured its rounds, these times
replace the cost model (`engine.round_governor`). Without a device, what rows of a pass cost says with how many
sequences drafts are tried at all.
The scheduler asks for `draft_lengths`; the engine reports acceptance to `learn` and times to `cost`.
Above all this stands what was measured (`engine.truth`): drafting is off where it made steps slower. There, and where
it is not expected to pay, drafters that look tokens up may still draft *copies*: each is weighed by what its row costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from paceline.config import EngineConfig
from paceline.drafters.guard import Guard
from paceline.engine.cost import CostModel
from paceline.engine.pace import Pace
from paceline.engine.population import Populations
from paceline.engine.round_governor import PLAIN_FASTER, KnownRounds, RoundGovernor
from paceline.engine.sequence import Sequence
from paceline.engine.stats import Prices
from paceline.engine.targets import GRANTED_TOKENS, NO_GRANTS, Grants, grants_of
from paceline.engine.truth import Truth
from paceline.runner.rounds.protocol import Rounds
from paceline.runner.rounds.traits import drafter_of, longest_draft, network_of
from paceline.types import Off, OffKind

# Prices (probabilities) that `Ask` carries until some are measured: about those of SmolLM2 on two cores. Without them
# drafters with `ends_drafts` would make all first drafts equally long, and the cost of a row could not be fitted.
PRIOR_PRICE, PRIOR_ROW_PRICE = 0.12, 0.06
# Share of a plain pass that a second row for each sequence may cost where drafts are tried at once. About 0.6 of the
# first tokens of drafts are right, and a head takes a quarter of a pass for them.
MAX_DOUBLING = 0.35
COPIED_TOKENS = 8  # tokens of the longest draft of a sequence while only copies are drafted
NOTHING_KNOWN: KnownRounds = (), {}  # without a device no drafter rests, and no round is timed


class Terms(NamedTuple):
    """Terms on which a drafter drafts in one step, for all its sequences."""

    off: Off | None  # why none of them drafts
    longest: int  # tokens
    ends_drafts: bool  # the drafter itself ends drafts
    entry: float | None = None  # probability of being right at which a draft pays; None: the cost model does not limit
    price: float = 0.0  # the same of one more token; unused without `entry`
    guarded: Off | None = None  # why only copies are drafted; None: anything is
    context: int | None = None  # tokens of a sequence and its draft, at most; None: as long as a lane


class Governor:
    def __init__(
        self, config: EngineConfig, drafters: Mapping[str, Guard], *, max_context: int, rounds: Rounds | None = None
    ) -> None:
        self.cost = CostModel()
        self._config = config
        self._drafters = drafters
        self._lane_length = max_context + config.max_draft
        self._rounds = rounds
        self._populations = Populations()
        self._limits: dict[tuple[str, int], int] = {}  # drafter, sequences → tokens of the longest draft
        self._enders: dict[str, bool] = {}  # drafter → whether it ends drafts itself
        self.in_rounds: RoundGovernor | None = None  # None: there is no device
        if rounds is not None:
            self.in_rounds = RoundGovernor(
                rounds, max_draft=config.max_draft, weighs=self._weighs_cost, longest=self._longest
            )
        self.crowded = False  # too many sequences run in the latest step for any to draft
        self.copies_only = False  # in the latest step only tokens are drafted that are looked up
        self.grants = NO_GRANTS  # what late requests are granted in the latest step
        self.knows_late = False  # of a sequence that decodes it is known how late it is
        self.batch = 0  # decoding sequences of the latest step
        self._over = False  # and they are more than the user lets draft
        measures = config.measure_speedup and bool(drafters or (rounds is not None and rounds.drafters))
        self.truth = Truth(guards=self._weighs_cost, prior=self._prior, copies=self._may_copy) if measures else None

    @contextmanager
    def fixed(self) -> Iterator[None]:
        """Draft as with `fixed_draft` until the end of the block, for a measurement beside governed drafts. What the
        governor knows stays as it is: steps of the block say nothing of what governed ones cost, or make a second."""
        kept = self._config, self.truth, self.cost
        self._config = replace(self._config, fixed_draft=True, max_draft_batch=None)
        self.truth, self.cost = None, CostModel()
        try:
            with nullcontext() if self.in_rounds is None else self.in_rounds.fixed():
                yield
        finally:
            self._config, self.truth, self.cost = kept

    def draft_lengths(self, sequences: Seq[Sequence], *, running: int, rows: int, alone: bool = False) -> list[int]:
        """Return the longest draft worth asking for, for each sequence, with at most `rows` tokens in all. If it is 0,
        the sequence's `off` says why, unless the step was drawn to run plain. `alone`: no prompt is read in the
        step."""
        drawn = self.truth is not None and self.truth.draws(sequences, alone=alone)
        guarded, copies_only, self.batch = None, False, len(sequences)
        if self.truth is not None:
            guarded, copies_only = self.truth.guarded, self.truth.copies_only
        elif len(sequences) > 1:
            guarded = self._prior(len(sequences))
            copies_only = guarded is not None
        most = self._config.max_draft_batch
        self._over = most is not None and running > most
        if self._over:
            guarded = Off(OffKind.BATCH, f"{running} sequences run, more than max_draft_batch {most}")
        self.grants = NO_GRANTS
        if self.knows_late and not (drawn or self._over):
            self.grants = self._grant(sequences, guarded)
        unguarded = self.grants.unguarded
        self.crowded = guarded is not None and not unguarded
        self.copies_only = copies_only and not self._over and self.cost.prices_rows
        if drawn:
            return [0] * len(sequences)
        # Loops instead of comprehensions, and one test instead of a call: on a CPU caches are cold after a pass.
        resting, seconds = NOTHING_KNOWN if self.in_rounds is None else self.in_rounds.known(sequences)
        terms_of_all: dict[str, Terms] = {}
        terms_of_late: dict[str, Terms] = {}  # that are not guarded
        wishes = []
        for sequence in sequences:
            drafter, terms, reason = sequence.drafter, terms_of_all, guarded
            if unguarded and sequence.key in unguarded:
                terms, reason = terms_of_late, None
            if (drafter is None or drafter in resting) and sequence.sampler.grammar is None:
                wishes.append(0)
                if drafter is not None:
                    sequence.off = PLAIN_FASTER
                continue
            if drafter is not None and drafter not in terms:
                by_cost = drafter not in seconds
                terms[drafter] = self._terms(drafter, reason, batch=len(sequences), by_cost=by_cost)
            if drafter is not None and terms[drafter].off is not None and sequence.sampler.grammar is None:
                wishes.append(0)
                sequence.off = terms[drafter].off
                continue
            wishes.append(self._wish(sequence, terms.get(drafter or "")))
        if self.in_rounds is not None:
            wishes = self.in_rounds.limited(sequences, wishes, seconds)
            if not self._over:
                wishes = self.in_rounds.copies.plan(sequences, wishes, self._useful_to_copy)
        total = min(rows, self._config.max_draft_tokens)
        if sum(wishes) <= total:
            return wishes
        lengths = fair_split(wishes, total)
        for sequence, wish, length in zip(sequences, wishes, lengths, strict=True):
            if wish and not length:
                detail = f"no room: {total} drafted tokens in a step of {len(wishes)} decoding sequences"
                sequence.off = Off(OffKind.NO_ROOM, detail)
        return lengths

    def _grant(self, sequences: Seq[Sequence], guarded: Off | None) -> Grants:
        """Return what late requests are granted in this step. If that is more than others get, the step counts on no
        side of the measured speed-up."""
        self.knows_late = any(each.lateness for each in sequences)
        if self._rounds is not None or not self._weighs_cost:
            return NO_GRANTS
        grants = grants_of(sequences, guarded=guarded is not None, slower=partial(self._slower, len(sequences)))
        if grants.unguarded and self.truth is not None:
            self.truth.side = None
        return grants

    def _slower(self, sequences: int, drafting: int) -> float:
        """Return the share by which a step of `sequences` takes longer if some of them draft; 0: not measured."""
        return (self.cost.doubling(sequences) or 0.0) * GRANTED_TOKENS * drafting / sequences

    def price(self, drafter: str) -> float:
        """Lowest probability of being right at which one more token is worth drafting; 0 if cost is not measured."""
        return (self.cost.price(drafter) or PRIOR_PRICE) if self._weighs_cost else 0.0

    def prices(self, drafter: str) -> Prices:
        """Return what drafting costs by the cost model, for people to read."""
        return Prices(entry=self.cost.entry(drafter), token=self.cost.price(drafter))

    @property
    def plain_speed(self) -> float:
        """Tokens a second that the engine would make without drafts: by steps that ran plain, before any did by the
        cost model. 0 if cost is not measured."""
        if not self._weighs_cost:
            return 0.0
        seconds = 0.0 if self.truth is None else self.truth.plain_seconds
        return self.batch / seconds if seconds else self.cost.plain_speed

    @property
    def plain_share(self) -> float:
        """Speed that the engine would have without drafts, relative to its speed now; 1 if cost is not measured."""
        return self.cost.share_of(self.plain_speed) if self._weighs_cost else 1.0

    @property
    def row_price(self) -> float:
        """Lowest probability of being right at which one more row is worth verifying, if drafting it is free."""
        return (self.cost.row_price or PRIOR_ROW_PRICE) if self._weighs_cost else 0.0

    def row_prices(self, sequences: int) -> tuple[float, ...]:
        """Lowest probability of being right at which the first, second … token of a draft is worth its row, if each of
        `sequences` drafts as many. (): unknown, or cost does not count."""
        return self.cost.row_prices(sequences) if self._weighs_cost else ()

    def seat_price(self, drafter: str) -> float:
        """Lowest probability of being right at which a device should draft one more token for a sequence.

        Draft passes run for all sequences of a round, so a token costs its row of the verification alone. That may be
        nothing: few rows take as long as one. It is rounded, because equal seats need no upload."""
        if not self._weighs_cost or not self._ends_drafts(drafter):
            return 0.0
        return round(self.cost.row_price if self.cost.knows_rows else PRIOR_ROW_PRICE, 2)

    @property
    def weighs_rows(self) -> bool:
        """True if whether to draft depends on what rows of a pass cost; a device has times of whole rounds instead."""
        return self._rounds is None and self._weighs_cost and bool(self._drafters)

    def _prior(self, sequences: int) -> Off | None:
        """Return why drafts for so many sequences are not expected to pay, before any were measured; None: they are."""
        if sequences < 2 or not self.weighs_rows:
            return None  # for a single sequence each draft is weighed by itself
        doubling = self.cost.doubling(sequences)
        if doubling is None:
            return Off(OffKind.WOULD_NOT_PAY, "what a second row for each sequence costs is not measured yet")
        if doubling <= MAX_DOUBLING:
            return None
        detail = f"a second row for each of {sequences} sequences takes {doubling:.0%} of a plain step"
        return Off(OffKind.WOULD_NOT_PAY, detail)

    @property
    def _weighs_cost(self) -> bool:
        return self._config.measure_cost and not self._config.fixed_draft

    def learn(self, sequence: Sequence, *, drafter: str | None, drafted: int, accepted: int) -> None:
        if not self._config.fixed_draft:
            output, pace = len(sequence.tokens) - sequence.prompt_length, sequence.paces[drafter]
            if not pace.begun:
                self._begin(pace, sequence, drafter)
            pace.learn(drafted, accepted, output_tokens=output, config=self._config)
            pace.population.learn(drafted, accepted)
            if self.in_rounds is not None:
                self.in_rounds.judged.add(drafter)

    def _begin(self, pace: Pace, sequence: Sequence, drafter: str | None) -> None:
        """Let the pace of a sequence with a drafter start from past drafts."""
        pace.begin(self._populations.of(drafter, sequence.request.kind))

    def tell(self, drafter: str | None) -> None:
        """Note that a round with passes of a drafter was judged, in which another draft took the place of its own."""
        if self.in_rounds is not None and not self._config.fixed_draft:
            self.in_rounds.judged.add(drafter)

    def forget(self, drafter: str) -> None:
        """Forget what is known of a drafter that was unloaded: another one may get its name."""
        self._limits = {key: limit for key, limit in self._limits.items() if key[0] != drafter}
        self._enders.pop(drafter, None)
        self._populations.forget(drafter)
        self.cost.forget(drafter)
        if self.truth is not None:
            self.truth.forget(drafter)

    def _wish(self, sequence: Sequence, terms: Terms | None) -> int:
        """Return the longest draft that a sequence can use and that pays; `terms`: of its drafter, if it has one."""
        length, state, grammar = len(sequence.tokens), sequence.in_flight, sequence.sampler.grammar
        # A round adds one token more than it accepts, so the last token of a sequence is never drafted. Steps in flight
        # count twice: the draft must still be needed if they add the fewest tokens, and must fit into the lane (context
        # and one draft) if they add the most.
        lane = self._lane_length if terms is None or terms.context is None else terms.context
        useful = min(sequence.max_length - state.least - 1, lane - state.most) - length
        if grammar is not None and grammar.forced and (forced := self._forced(sequence, useful)) > 0:
            return forced
        if terms is None or useful <= 0:
            if lane < self._lane_length and length + state.most >= lane:
                detail = f"{length} tokens of context, and drafter {sequence.drafter} knows {lane}"
                sequence.off = Off(OffKind.CONTEXT, detail)
            return 0
        pace = sequence.paces[sequence.drafter]
        if not pace.begun:
            self._begin(pace, sequence, sequence.drafter)
        if self.grants.worth and sequence.key in self.grants.worth:
            terms = self._granted(terms, pace, key=sequence.key)
        sequence.off = terms.off or self._reason_against(length, pace, length - sequence.prompt_length)
        if terms.guarded is not None and sequence.off is None and pace.skips():
            sequence.off = terms.guarded
        if grammar is not None and sequence.off is None:
            sequence.off = self._grammars_reason(sequence)
        if sequence.off is not None:
            return 0
        limit, own = min(useful, terms.longest), sequence.request.speculation.max_draft
        if own is not None:
            limit = min(limit, own)
        if not terms.ends_drafts and not self._config.fixed_draft:
            limit = min(limit, pace.length)
        affordable = None if terms.entry is None else self._affordable(sequence, pace, terms)
        if terms.guarded is not None and terms.entry is not None and (affordable is None or pace.doubted):
            affordable = 1  # a probe, for which others wait
        if affordable is None or (affordable and terms.ends_drafts and not pace.doubted):
            return limit
        return min(limit, affordable)

    def _granted(self, terms: Terms, pace: Pace, *, key: int) -> Terms:
        """Return the terms of a late request: with lower prices, which may end a pause. `key`: of its sequence."""
        worth = self.grants.worth[key]
        if key in self.grants.unguarded:
            terms = terms._replace(longest=min(terms.longest, GRANTED_TOKENS))
        if terms.entry is None:
            return terms
        entry, reason = terms.entry / worth, pace.reason
        if (
            reason is not None
            and reason.kind is OffKind.WOULD_NOT_PAY
            and pace.chance(whole=terms.ends_drafts) >= entry
        ):
            pace.resume()
        return terms._replace(entry=entry, price=terms.price / worth)

    def _useful_to_copy(self, sequence: Sequence) -> int:
        """Return the longest copy that a sequence can use, whatever the network of its drafter may draft."""
        if len(sequence.tokens) > self._config.max_draft_context:
            return 0
        own, state = sequence.request.speculation.max_draft, sequence.in_flight
        useful = min(sequence.max_length - state.least - 1, self._lane_length - state.most) - len(sequence.tokens)
        return useful if own is None else min(useful, own)

    def _terms(self, drafter: str, guarded: Off | None, *, batch: int, by_cost: bool) -> Terms:
        guard, off, longest = self._guard(drafter), guarded, self._longest(drafter, batch)
        copies = self.copies_only and self._may_copy(drafter)
        if copies:
            off, longest = None, min(longest, COPIED_TOKENS)
        if guard is not None and guard.out is not None:
            off = Off(OffKind.DRAFTER_OUT, guard.out)
        context = None if guard is None or guard.max_context is None else min(self._lane_length, guard.max_context)
        terms = Terms(off, longest, self._ends_drafts(drafter), guarded=guarded if copies else None, context=context)
        if not by_cost or not self._weighs_cost or (guard is not None and guard.weighs_cost):
            return terms
        if copies:
            price = self.cost.row_prices(batch)[0]
            return terms._replace(entry=price, price=price)
        return terms._replace(entry=self.cost.entry(drafter), price=self.cost.price(drafter))

    def _may_copy(self, drafter: str) -> bool:
        guard = self._drafters.get(drafter)
        return guard is not None and guard.copies and self.weighs_rows

    def _forced(self, sequence: Sequence, useful: int) -> int:
        """Count the next tokens, behind all that may be in flight, that the grammar forces: they need no drafter, and
        always pay. At most 0: none."""
        grammar, speculation = sequence.sampler.grammar, sequence.request.speculation
        if grammar is None or grammar.slow or not speculation.enabled or self._over:
            return 0
        limit, ahead = min(useful, self._config.max_draft, speculation.max_draft or useful), sequence.in_flight.most
        return min(len(grammar.forced) - ahead, limit)

    def _grammars_reason(self, sequence: Sequence) -> Off | None:
        """Return why nothing is drafted; None: the grammar is quick enough."""
        grammar = sequence.sampler.grammar
        if grammar is not None and grammar.slow and sequence.draws_masked:
            return Off(OffKind.GRAMMAR, "the grammar's masks take long: the tokens of a draft would wait for them")
        return None

    def _longest(self, drafter: str, batch: int) -> int:
        """Return the tokens of a drafter's longest draft for one of `batch` sequences: limits that never change."""
        if (drafter, batch) not in self._limits:
            rounds, limits = self._rounds, [self._config.max_draft]
            if (guard := self._guard(drafter)) is not None:
                limits.append(guard.max_draft)
            if rounds is not None:
                inside = drafter_of(rounds.drafters.get(drafter), batch, rounds.max_draft)
                limits.append(rounds.max_draft if inside is None else longest_draft(inside, rounds.max_draft))
            self._limits[drafter, batch] = min(limits)
        return self._limits[drafter, batch]

    def _guard(self, drafter: str) -> Guard | None:
        """Return the guard of a drafter, whose limits hold on a device, too; for a portfolio there, its network's."""
        inside = {} if self._rounds is None else self._rounds.drafters
        return self._drafters.get(network_of(drafter, inside) if drafter in inside else drafter)

    def _ends_drafts(self, drafter: str) -> bool:
        if drafter not in self._enders:
            guard, rounds = self._drafters.get(drafter), self._rounds
            by = guard if rounds is None else rounds.drafters.get(drafter, guard)
            self._enders[drafter] = bool(getattr(by, "ends_drafts", False))
        return self._enders[drafter]

    def _affordable(self, sequence: Sequence, pace: Pace, terms: Terms) -> int | None:
        """Return the longest draft that pays; None: no limit. If none pays, pause the sequence and set its `off`."""
        entry = terms.entry or 0.0
        length = pace.affordable(entry=entry, price=terms.price, whole=terms.ends_drafts)
        if length == 0:
            chance = pace.chance(whole=terms.ends_drafts)
            detail = f"paused: a drafted token was right with {chance:.0%}, with {entry:.0%} it would pay"
            self._pause(sequence, Off(OffKind.WOULD_NOT_PAY, detail))
        return length

    def _pause(self, sequence: Sequence, reason: Off) -> None:
        output_tokens = len(sequence.tokens) - sequence.prompt_length
        sequence.pace.pause(reason, output_tokens=output_tokens, tokens=self._config.pause_tokens // 4 + 1)
        sequence.off = reason

    def _reason_against(self, length: int, pace: Pace, output_tokens: int) -> Off | None:
        """Return why a sequence of this length may not draft, whatever its drafter's terms are."""
        longest = self._config.max_draft_context
        if length > longest:
            return Off(OffKind.CONTEXT, f"{length} tokens of context, more than max_draft_context {longest}")
        return pace.reason if not self._config.fixed_draft and pace.paused(output_tokens) else None


def fair_split(wishes: Seq[int], total: int) -> list[int]:
    """Share `total` among wishes. If it does not suffice, small wishes are met first and the rest is split evenly."""
    if sum(wishes) <= total:
        return list(wishes)
    shares = [0] * len(wishes)
    order = sorted(range(len(wishes)), key=lambda i: wishes[i])
    for place, i in enumerate(order):
        shares[i] = min(wishes[i], total // (len(order) - place))
        total -= shares[i]
    return shares
