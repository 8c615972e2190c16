"""The governor decides how many tokens each sequence drafts in a step, and says why a sequence drafts none.

Three things limit a draft: the user's settings, the sequence's own pace, and the cost of a drafted token on this
machine (`engine.cost`) compared with its probability of being right. If a device has measured its rounds, these times
replace the cost model: the draft length is the one with which the batch makes the most tokens per second, and may be 0.
A round takes as long as the device or the host needs for it, whichever is longer: they work beside each other.
Without a device, what rows of a pass cost says with how many sequences drafts are tried at all.
The scheduler asks for `draft_lengths`; the engine reports acceptance to `learn` and times to `cost`.
Above all this stands what was measured (`engine.truth`): drafting is off where it made steps slower.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from statistics import linear_regression
from typing import NamedTuple

from paceline.config import EngineConfig
from paceline.drafters.guard import Guard
from paceline.engine.cost import CostModel
from paceline.engine.host_times import HostTimes
from paceline.engine.pace import Others, Pace
from paceline.engine.rests import MAX_REST, PLAIN, Chance, Rests, Trials, rest_after, speeds
from paceline.engine.sequence import Sequence
from paceline.engine.stats import Prices
from paceline.engine.truth import Truth
from paceline.runner.rounds.protocol import Rounds
from paceline.runner.rounds.traits import drafter_of, levels_of, longest_draft
from paceline.types import Off, OffKind

# Prices (probabilities) that `Ask` carries until some are measured: about those of SmolLM2 on two cores. Without them
# drafters with `ends_drafts` would make all first drafts equally long, and the cost of a row could not be fitted.
PRIOR_PRICE, PRIOR_ROW_PRICE = 0.12, 0.06
# Speed over plain rounds from which a device drafts. Less is within the error of round times, and sequences that get
# different numbers of tokens end one after the other.
WORTHWHILE = 1.02
TRIAL_TOKENS = 16  # tokens of each sequence that a model may have missed before a trial; a batch shares them
LOOK_SEQUENCES, MAX_KEPT = 12, 4  # sequences per round, and rounds at most, for which a best draft length is kept
# Share of a plain pass that a second row for each sequence may cost where drafts are tried at once. About 0.6 of the
# first tokens of drafts are right, and a head takes a quarter of a pass for them.
MAX_DOUBLING = 0.35
PLAIN_FASTER = Off(OffKind.PLAIN_FASTER, "paused: plain rounds make more tokens a second")


KnownRounds = tuple[Collection[str], Mapping[str, list[float]]]
"""Drafters that rest, and seconds of rounds with drafts of 0, 1, … tokens by drafter."""
NOTHING_KNOWN: KnownRounds = (), {}  # without a device no drafter rests, and no round is timed


class Best(NamedTuple):
    """The best draft length of a drafter, as it was found some rounds ago."""

    length: int  # tokens
    batch: int  # sequences for which it is kept
    rounds: int  # rounds for which it is kept
    seconds: list[float]  # of rounds with drafts of 0, 1, … tokens, by which it is the best


class Terms(NamedTuple):
    """Terms on which a drafter drafts in one step, for all its sequences."""

    off: Off | None  # why none of them drafts
    longest: int  # tokens
    ends_drafts: bool  # the drafter itself ends drafts
    weighed: bool  # the cost model limits drafts: the times of rounds are not known


class Governor:
    def __init__(
        self, config: EngineConfig, drafters: Mapping[str, Guard], *, max_context: int, rounds: Rounds | None = None
    ) -> None:
        self.cost = CostModel()
        self._config = config
        self._drafters = drafters
        self._lane_length = max_context + config.max_draft
        self._rounds = rounds
        self._rests = Rests()
        self._trials = Trials()
        self._spent: defaultdict[str, float] = defaultdict(float)  # drafter → plain rounds that its trial has cost
        self._best: dict[str, Best] = {}  # by drafter
        self._judged: set[str | None] = set()  # drafters with drafts that were judged since the last step was planned
        self._others: defaultdict[str | None, Others] = defaultdict(Others)  # by drafter
        self.host = HostTimes()
        self._limits: dict[tuple[str, int], int] = {}  # drafter, sequences → tokens of the longest draft
        # drafter, sequences → levels of drafts of 0, 1, … tokens
        self._known_levels: dict[tuple[str, int], list[int]] = {}
        self._enders: dict[str, bool] = {}  # drafter → whether it ends drafts itself
        self.crowded = False  # too many sequences run in the latest step for any to draft
        self._over = False  # and they are more than the user lets draft
        measures = config.measure_speedup and bool(drafters or (rounds is not None and rounds.drafters))
        self.truth = Truth(guards=self._weighs_cost, prior=self._prior) if measures else None

    @contextmanager
    def fixed(self) -> Iterator[None]:
        """Draft as with `fixed_draft` until the end of the block, for a measurement beside governed drafts. What the
        governor knows of acceptance and of rests stays as it is; passes still teach it what rows cost."""
        kept = self._config, self._rests, self._trials, self.truth
        self._config = replace(self._config, fixed_draft=True, max_draft_batch=None)
        self._rests, self._trials, self.truth = Rests(), Trials(), None
        try:
            yield
        finally:
            self._config, self._rests, self._trials, self.truth = kept

    def draft_lengths(self, sequences: Seq[Sequence], *, running: int, rows: int, alone: bool = False) -> list[int]:
        """Return the longest draft worth asking for, for each sequence, with at most `rows` tokens in all. If it is 0,
        the sequence's `off` says why, unless the step was drawn to run plain. `alone`: no prompt is read in the
        step."""
        drawn = self.truth is not None and self.truth.draws(sequences, alone=alone)
        guarded = None
        if self.truth is not None:
            guarded = self.truth.guarded
        elif len(sequences) > 1:
            guarded = self._prior(len(sequences))
        most = self._config.max_draft_batch
        self._over = most is not None and running > most
        if self._over:
            guarded = Off(OffKind.BATCH, f"{running} sequences run, more than max_draft_batch {most}")
        self.crowded = guarded is not None
        if drawn:
            return [0] * len(sequences)
        # Loops instead of comprehensions, and one test instead of a call: on a CPU caches are cold after a pass.
        resting, seconds = NOTHING_KNOWN if self._rounds is None else self._known_rounds(sequences)
        terms: dict[str, Terms] = {}
        wishes = []
        for sequence in sequences:
            drafter = sequence.drafter
            if (drafter is None or drafter in resting) and sequence.sampler.grammar is None:
                wishes.append(0)
                if drafter is not None:
                    sequence.off = PLAIN_FASTER
                continue
            if drafter is not None and drafter not in terms:
                by_cost = drafter not in seconds
                terms[drafter] = self._terms(drafter, guarded, batch=len(sequences), by_cost=by_cost)
            wishes.append(self._wish(sequence, terms.get(drafter or "")))
        for drafter, known in seconds.items():
            wishes = self._within_a_round(sequences, wishes, drafter, known)
        if self._rounds is not None and self._rounds.timed and self._weighs_cost:
            wishes = self._short_trials(sequences, wishes, seconds)
        total = min(rows, self._config.max_draft_tokens)
        if sum(wishes) <= total:
            return wishes
        lengths = fair_split(wishes, total)
        for sequence, wish, length in zip(sequences, wishes, lengths, strict=True):
            if wish and not length:
                detail = f"no room: {total} drafted tokens in a step of {len(wishes)} decoding sequences"
                sequence.off = Off(OffKind.NO_ROOM, detail)
        return lengths

    def price(self, drafter: str) -> float:
        """Lowest probability of being right at which one more token is worth drafting; 0 if cost is not measured."""
        return (self.cost.price(drafter) or PRIOR_PRICE) if self._weighs_cost else 0.0

    def prices(self, drafter: str) -> Prices:
        """Return what drafting costs by the cost model, for people to read."""
        return Prices(entry=self.cost.entry(drafter), token=self.cost.price(drafter))

    @property
    def plain_speed(self) -> float:
        """Tokens a second that the engine would make without drafts; 0 if cost is not measured."""
        return self.cost.plain_speed if self._weighs_cost else 0.0

    @property
    def plain_share(self) -> float:
        """Speed that the engine would have without drafts, relative to its speed now; 1 if cost is not measured."""
        return self.cost.plain_share if self._weighs_cost else 1.0

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
            output = len(sequence.tokens) - sequence.prompt_length
            sequence.paces[drafter].learn(drafted, accepted, output_tokens=output, config=self._config)
            self._others[drafter].learn(drafted, accepted)
            if self._rounds is not None:
                self._judged.add(drafter)

    def _wish(self, sequence: Sequence, terms: Terms | None) -> int:
        """Return the longest draft that a sequence can use and that pays; `terms`: of its drafter, if it has one."""
        length, state, grammar = len(sequence.tokens), sequence.in_flight, sequence.sampler.grammar
        # A round adds one token more than it accepts, so the last token of a sequence is never drafted. Steps in flight
        # count twice: the draft must still be needed if they add the fewest tokens, and must fit into the lane (context
        # and one draft) if they add the most.
        useful = min(sequence.max_length - state.least - 1, self._lane_length - state.most) - length
        if grammar is not None and grammar.forced and (forced := self._forced(sequence, useful)) > 0:
            return forced
        if terms is None or useful <= 0:
            return 0
        pace = sequence.pace
        sequence.off = terms.off or self._reason_against(length, pace, length - sequence.prompt_length)
        if grammar is not None and sequence.off is None:
            sequence.off = self._grammars_reason(sequence)
        if sequence.off is not None:
            return 0
        limit, own = min(useful, terms.longest), sequence.request.speculation.max_draft
        if own is not None:
            limit = min(limit, own)
        if not terms.ends_drafts and not self._config.fixed_draft:
            limit = min(limit, pace.length)
        affordable = self._affordable(sequence, pace) if terms.weighed else None
        return limit if affordable is None or (affordable and terms.ends_drafts) else min(limit, affordable)

    def _terms(self, drafter: str, guarded: Off | None, *, batch: int, by_cost: bool) -> Terms:
        guard, off = self._drafters.get(drafter), guarded
        if guard is not None and guard.out is not None:
            off = Off(OffKind.DRAFTER_OUT, guard.out)
        weighed = by_cost and self._weighs_cost and not (guard is not None and guard.weighs_cost)
        return Terms(off, self._longest(drafter, batch), self._ends_drafts(drafter), weighed)

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
            if drafter in self._drafters:
                limits.append(self._drafters[drafter].max_draft)
            if rounds is not None:
                inside = drafter_of(rounds.drafters.get(drafter), batch, rounds.max_draft)
                limits.append(rounds.max_draft if inside is None else longest_draft(inside, rounds.max_draft))
            self._limits[drafter, batch] = min(limits)
        return self._limits[drafter, batch]

    def _levels(self, drafter: str, batch: int) -> Seq[int]:
        """Return the levels of drafts of 0, 1, … tokens for each of `batch` sequences."""
        if (drafter, batch) not in self._known_levels:
            rounds = self._rounds
            assert rounds is not None, "only rounds on a device have a table of levels"
            by = drafter_of(rounds.drafters.get(drafter), batch, rounds.max_draft)
            lengths = range(min(self._config.max_draft, rounds.max_draft) + 1)
            self._known_levels[drafter, batch] = [levels_of(by, length, rounds.max_draft) for length in lengths]
        return self._known_levels[drafter, batch]

    def _ends_drafts(self, drafter: str) -> bool:
        if drafter not in self._enders:
            guard, rounds = self._drafters.get(drafter), self._rounds
            by = guard if rounds is None else rounds.drafters.get(drafter, guard)
            self._enders[drafter] = bool(getattr(by, "ends_drafts", False))
        return self._enders[drafter]

    def _known_rounds(self, sequences: Seq[Sequence]) -> KnownRounds:
        """Return the drafters that rest or are on trial in this round of a device, and the seconds of rounds of the
        others that are known."""
        drafters = [name for name in dict.fromkeys([sequence.drafter for sequence in sequences]) if name is not None]
        for judged in self._judged:
            self._rests.tell(judged)
            self._trials.tell(judged)
        self._judged.clear()
        batch = len(sequences)
        resting = self._resting(drafters, batch=batch)
        awake = [name for name in drafters if name not in resting] if self._weighs_cost else []
        if not awake:
            return resting, {}
        masked = any(each.caution.rounds for each in sequences if each.caution is not None)
        seconds = self._round_seconds(awake, batch=batch, masked=masked)
        return resting | self._on_trial([name for name in awake if name not in seconds], batch=batch), seconds

    def _resting(self, drafters: Seq[str], *, batch: int) -> set[str]:
        """Return the drafters that rest in this round."""
        rested = {drafter: self._rests.is_hopeless(drafter) for drafter in drafters if drafter in self._rests}
        resting = {drafter for drafter in rested if self._rests.count_down(drafter, batch=batch)}
        for drafter, hopeless in rested.items():
            if drafter not in self._rests and not hopeless:
                self.host.forget(drafter)  # a time that a busy moment made too long would keep it off for ever
        return resting

    def _round_seconds(self, drafters: Seq[str], *, batch: int, masked: bool) -> dict[str, list[float]]:
        """Map each drafter to the seconds of its rounds with drafts of 0, 1, … tokens; only those with known times."""
        tables = {drafter: self._table(drafter, batch=batch, masked=masked) for drafter in drafters}
        return {drafter: table for drafter, table in tables.items() if table}

    def _kept(self, drafter: str, batch: int) -> Best | None:
        """Return the best length that is kept for this round, if there is one.

        Large batches look less often: it takes the host as many times longer, and their average changes slowly."""
        best = self._best.get(drafter)
        return best if best is not None and best.length and best.rounds > 0 and best.batch == batch else None

    def _on_trial(self, drafters: Seq[str], *, batch: int) -> set[str]:
        """Return those of the drafters without known times that do not draft in this round of their trial."""
        if self._rounds is None or not self._rounds.timed:
            return set()
        return {drafter for drafter in drafters if self._tries_plain(drafter, batch=batch)}

    def _short_trials(self, sequences: Seq[Sequence], wishes: list[int], known: Collection[str]) -> list[int]:
        """Cut drafts by models whose rounds take an unknown time to one token, which takes a pass for all, and to the
        sequences of which the model has missed nothing; if there are none, to those of which it has missed least."""
        assert self._rounds is not None
        trying = [name for name in self._rounds.readers if name not in known]
        if not trying:
            return wishes
        places = [i for i, (s, wish) in enumerate(zip(sequences, wishes, strict=True)) if wish and s.drafter in trying]
        missed = {i: _missed(sequences[i]) for i in places}
        room = (
            max([TRIAL_TOKENS * len(places), *(2 * count for count in missed.values())]) if all(missed.values()) else 0
        )
        for i in sorted(places, key=missed.__getitem__):
            room -= missed[i]
            wishes[i] = int(room >= 0)
            if room < 0:
                sequences[i].off = Off(OffKind.BEHIND, "others try first whether drafts pay: they have less to read")
        return wishes

    def _tries_plain(self, drafter: str, *, batch: int) -> bool:
        """Return whether a round of a trial is plain."""
        assert self._rounds is not None
        times = self._rounds.round_seconds(batch, 0, drafter), self.host.of(None, batch=batch)
        reads = drafter in self._rounds.readers or drafter in self._rounds.tapping
        return self._trials.goes_plain(drafter, batch=batch, knows_plain=None not in times, reads=reads)

    def _table(self, drafter: str, *, batch: int, masked: bool) -> list[float]:
        """Return seconds of rounds with drafts of 0, 1, … tokens, as the device or the host needs: whichever is longer.
        Empty if fewer than two lengths were measured, or if the host was not. While a best length is kept, nobody looks
        for another one."""
        assert self._rounds is not None
        if (best := self._kept(drafter, batch)) is not None:
            return best.seconds
        device, host = self._device_table(drafter, batch=batch), self.host.pair(drafter, batch=batch, masked=masked)
        if host is None:
            return [] if self._rounds.timed else device
        plain, drafting = host
        return [max(seconds, drafting if length else plain) for length, seconds in enumerate(device)]

    def _device_table(self, drafter: str, *, batch: int) -> list[float]:
        """Return seconds that the device needs: measured, or from a line through the measured ones."""
        assert self._rounds is not None
        lengths = range(self._longest(drafter, batch) + 1)
        measured = [self._rounds.round_seconds(batch, length, drafter) for length in lengths]
        known = [(length, seconds) for length, seconds in enumerate(measured) if seconds is not None]
        if len(known) < 2:
            return []
        if len(known) == len(measured):
            return [seconds for _, seconds in known]
        slope, base = linear_regression(*zip(*known, strict=True))
        least = min(seconds for _, seconds in known) / 2  # lower bound, so that the line never predicts a free round
        return [max(base + slope * i, least) if seconds is None else seconds for i, seconds in enumerate(measured)]

    def _within_a_round(
        self, sequences: Seq[Sequence], wishes: list[int], drafter: str, seconds: list[float]
    ) -> list[int]:
        """Cap the drafts of `drafter` at the length that maximises tokens per second of the batch, in which sequences
        of other drafters decode plainly. If that length is 0, this round probes, unless even perfect drafts would not
        pay, and the drafter rests afterwards."""
        own = [wish if s.drafter == drafter else 0 for s, wish in zip(sequences, wishes, strict=True)]
        if not any(own):
            return wishes
        if (best := self._kept(drafter, len(sequences))) is not None:
            self._best[drafter], length = best._replace(rounds=best.rounds - 1), best.length
        else:
            length = self._best_length(sequences, own, drafter, seconds)
        return [min(wish, length) if mine else wish for wish, mine in zip(wishes, own, strict=True)]

    def _best_length(self, sequences: Seq[Sequence], wishes: Seq[int], drafter: str, seconds: list[float]) -> int:
        others, pairs = self._others[drafter], [*zip(sequences, wishes, strict=True)]
        chances = [Chance(*s.pace.recent(others), wish) if wish else PLAIN for s, wish in pairs]
        batch = len(sequences)
        speed = speeds(chances, seconds, self._levels(drafter, batch))
        length = speed.index(max(speed)) if max(speed) > WORTHWHILE * speed[0] else 0
        tried = self._trials.end(drafter, pays=length > 0)
        self._best[drafter] = Best(length, batch, min(batch // LOOK_SEQUENCES, MAX_KEPT), seconds)
        if length:
            self._rests.end(drafter)
            self._spent.pop(drafter, None)
            return length
        begins, length = drafter not in self._rests, self._probe(drafter, wishes, speed, seconds, tried=tried)
        for sequence in (sequence for sequence, wish in pairs if wish):
            sequence.off = PLAIN_FASTER
            sequence.pace.pauses += begins
        return length

    def _probe(self, drafter: str, wishes: Seq[int], speed: Seq[float], seconds: Seq[float], *, tried: int) -> int:
        """Return the draft length of a probe before a rest, the fastest but 0. No probe (0) if the drafter rests
        already, if even perfect drafts would not pay, or after a trial; `tried`: rounds of the rest after that."""
        if drafter in self._rests:
            return 0
        batch = len(wishes)
        perfect, levels = [Chance(1.0, 1.0, wish) for wish in wishes], self._levels(drafter, batch)
        length = speed.index(max(speed[1:])) if _pays(speeds(perfect, seconds, levels)) else 0
        rounds = rest_after(seconds[length] / seconds[0] - 1) if length else MAX_REST
        hopeless = not length and not _pays(speeds(perfect, self._device_table(drafter, batch=batch), levels))
        rounds = max(min(rounds, tried or rounds), rest_after(self._spent.pop(drafter, 0.0)))
        self._rests.begin(drafter, batch=batch, rounds=rounds, hopeless=hopeless)
        return 0 if tried else length

    def charge(self, drafter: str, *, batch: int, seconds: float) -> None:
        """Note how long a device was busy with a round in which the drafter drafted, and with all that the drafter read
        for it. A trial or a probe must not cost more than its share of the time."""
        if self._rounds is None or not self._rounds.timed or not self._weighs_cost:
            return
        plain = self._rounds.round_seconds(batch, 0, drafter)
        if plain:
            self._spent[drafter] += max(seconds / plain - 1, 0.0)
            if drafter in self._rests:
                self._rests.extend(drafter, rest_after(self._spent.pop(drafter)))

    def _affordable(self, sequence: Sequence, pace: Pace) -> int | None:
        """Return the longest draft that pays; None: no limit. If none pays, pause the sequence and set its `off`."""
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

    def _reason_against(self, length: int, pace: Pace, output_tokens: int) -> Off | None:
        """Return why a sequence of this length may not draft, whatever its drafter's terms are."""
        longest = self._config.max_draft_context
        if length > longest:
            return Off(OffKind.CONTEXT, f"{length} tokens of context, more than max_draft_context {longest}")
        return pace.reason if not self._config.fixed_draft and pace.paused(output_tokens) else None


def _missed(sequence: Sequence) -> int:
    """Count the tokens of a sequence that a model on the device must read before it can draft."""
    state = sequence.in_flight
    return len(state.unread(len(sequence.tokens)) or ()) if state.follower is not None else 0


def _pays(speed: Seq[float]) -> bool:
    """Return whether drafts of any length are faster than none; `speed`: with drafts of 0, 1, … tokens."""
    return max(speed) > speed[0]


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
