"""The governor of rounds on a device: how long drafts are, by measured times of rounds, and which drafters rest.

A round takes as long as the device or the host needs for it, whichever is longer: they work beside each other. The
draft length is the one with which the batch makes the most tokens per second, and may be 0. Then the drafter rests
(`engine.rests`). Until the times of rounds are known, drafters are on trial.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from statistics import linear_regression
from typing import NamedTuple

from paceline.engine.copies import Copies
from paceline.engine.host_times import HostTimes
from paceline.engine.rests import MAX_REST, PLAIN, Chance, Rests, Trials, rest_after, speeds
from paceline.engine.sequence import Sequence
from paceline.runner.rounds.protocol import Rounds
from paceline.runner.rounds.traits import drafter_of, levels_of
from paceline.types import Off, OffKind

# Speed over plain rounds from which a device drafts. Less is within the error of round times, and sequences that get
# different numbers of tokens end one after the other.
WORTHWHILE = 1.02
TRIAL_TOKENS = 16  # tokens of each sequence that a model may have missed before a trial; a batch shares them
LOOK_SEQUENCES, MAX_KEPT = 12, 4  # sequences per round, and rounds at most, for which a best draft length is kept
PLAIN_FASTER = Off(OffKind.PLAIN_FASTER, "paused: plain rounds make more tokens a second")

KnownRounds = tuple[Collection[str], Mapping[str, list[float]]]
"""Drafters that rest, and seconds of rounds with drafts of 0, 1, … tokens by drafter."""


class Best(NamedTuple):
    """The best draft length of a drafter, as it was found some rounds ago."""

    length: int  # tokens
    batch: int  # sequences for which it is kept
    rounds: int  # rounds for which it is kept
    seconds: list[float]  # of rounds with drafts of 0, 1, … tokens, by which it is the best


class RoundGovernor:
    def __init__(self, rounds: Rounds, *, max_draft: int, weighs: bool, longest: Callable[[str, int], int]) -> None:
        """`max_draft`: tokens of the longest draft of any drafter. `weighs`: drafts are made only where they pay.
        `longest`: tokens of a drafter's longest draft for one of so many sequences."""
        self.host = HostTimes()
        self.judged: set[str | None] = set()  # drafters with drafts that were judged since the last step was planned
        self.copies = Copies(rounds)
        self._rounds = rounds
        self._max_draft = max_draft
        self._weighs = weighs
        self._longest = longest
        self._rests = Rests()
        self._trials = Trials()
        self._spent: defaultdict[str, float] = defaultdict(float)  # drafter → plain rounds that its trial has cost
        self._best: dict[str, Best] = {}  # by drafter
        # drafter, sequences → levels of drafts of 0, 1, … tokens
        self._known_levels: dict[tuple[str, int], list[int]] = {}

    @contextmanager
    def fixed(self) -> Iterator[None]:
        """Let every drafter draft until the end of the block, and keep what is known of rests."""
        kept = self._weighs, self._rests, self._trials
        self._weighs, self._rests, self._trials = False, Rests(), Trials()
        try:
            yield
        finally:
            self._weighs, self._rests, self._trials = kept

    def known(self, sequences: Seq[Sequence]) -> KnownRounds:
        """Return the drafters that rest or are on trial in this round of a device, and the seconds of rounds of the
        others that are known."""
        drafters = [name for name in dict.fromkeys([sequence.drafter for sequence in sequences]) if name is not None]
        for judged in self.judged:
            self._rests.tell(judged)
            self._trials.tell(judged)
        self.judged.clear()
        batch = len(sequences)
        resting = self._resting(drafters, batch=batch)
        awake = [name for name in drafters if name not in resting] if self._weighs else []
        self.copies.pause(())
        if not awake:
            return resting, {}
        masked = any(each.caution.rounds for each in sequences if each.caution is not None)
        seconds = self._round_seconds(awake, batch=batch, masked=masked)
        trying = self._on_trial([name for name in awake if name not in seconds], batch=batch)
        self.copies.pause(trying)
        return resting | trying, seconds

    def limited(self, sequences: Seq[Sequence], wishes: list[int], seconds: Mapping[str, list[float]]) -> list[int]:
        """Return drafts no longer than pay; `seconds`: of rounds, by drafters for which they are known."""
        for drafter, known in seconds.items():
            wishes = self._within_a_round(sequences, wishes, drafter, known)
        return self._short_trials(sequences, wishes, seconds) if self._rounds.timed and self._weighs else wishes

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
        if not self._rounds.timed:
            return set()
        return {drafter for drafter in drafters if self._tries_plain(drafter, batch=batch)}

    def _short_trials(self, sequences: Seq[Sequence], wishes: list[int], known: Collection[str]) -> list[int]:
        """Cut drafts by models whose rounds take an unknown time to one token, which takes a pass for all, and to the
        sequences of which the model has missed nothing; if there are none, to those of which it has missed least."""
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
        times = self._rounds.round_seconds(batch, 0, drafter), self.host.of(None, batch=batch)
        reads = drafter in self._rounds.readers or drafter in self._rounds.tapping
        return self._trials.goes_plain(drafter, batch=batch, knows_plain=None not in times, reads=reads)

    def _table(self, drafter: str, *, batch: int, masked: bool) -> list[float]:
        """Return seconds of rounds with drafts of 0, 1, … tokens, as the device or the host needs: whichever is longer.
        Empty if fewer than two lengths were measured, or if the host was not. While a best length is kept, nobody looks
        for another one."""
        if (best := self._kept(drafter, batch)) is not None:
            return best.seconds
        device, host = self._device_table(drafter, batch=batch), self.host.pair(drafter, batch=batch, masked=masked)
        if host is None:
            return [] if self._rounds.timed else device
        plain, drafting = host
        return [max(seconds, drafting if length else plain) for length, seconds in enumerate(device)]

    def _device_table(self, drafter: str, *, batch: int) -> list[float]:
        """Return seconds that the device needs: measured, or from a line through the measured ones."""
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
        pairs = [*zip(sequences, wishes, strict=True)]
        chances = [Chance(*s.pace.recent(), wish) if wish else PLAIN for s, wish in pairs]
        batch, levels, shares = len(sequences), self._levels(drafter, len(sequences)), self.copies.shares(sequences)
        used = [
            chance if not share else chance._replace(found=chance.found * (1 - share))
            for chance, share in zip(chances, shares, strict=True)
        ]
        speed = speeds(used, seconds, levels)
        length = _best_of(speed)
        if not length and any(shares) and _best_of(speeds(chances, seconds, levels)):
            return self._plain(pairs)  # no rest: it pays again as soon as these texts repeat no longer
        tried = self._trials.end(drafter, pays=length > 0)
        self._best[drafter] = Best(length, batch, min(batch // LOOK_SEQUENCES, MAX_KEPT), seconds)
        if length:
            self._rests.end(drafter)
            self._spent.pop(drafter, None)
            return length
        begins, length = drafter not in self._rests, self._probe(drafter, wishes, speed, seconds, tried=tried)
        for sequence in (sequence for sequence, wish in pairs if wish):
            sequence.pace.pauses += begins
        self._plain(pairs)
        return length

    def _plain(self, pairs: Seq[tuple[Sequence, int]]) -> int:
        """Say why the sequences that wish for a draft get none; returns its length."""
        for sequence in (sequence for sequence, wish in pairs if wish):
            sequence.off = PLAIN_FASTER
        return 0

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
        if not self._rounds.timed or not self._weighs:
            return
        plain = self._rounds.round_seconds(batch, 0, drafter)
        if plain:
            self._spent[drafter] += max(seconds / plain - 1, 0.0)
            if drafter in self._rests:
                self._rests.extend(drafter, rest_after(self._spent.pop(drafter)))

    def _levels(self, drafter: str, batch: int) -> Seq[int]:
        """Return the levels of drafts of 0, 1, … tokens for each of `batch` sequences."""
        if (drafter, batch) not in self._known_levels:
            rounds = self._rounds
            by = drafter_of(rounds.drafters.get(drafter), batch, rounds.max_draft)
            lengths = range(min(self._max_draft, rounds.max_draft) + 1)
            self._known_levels[drafter, batch] = [levels_of(by, length, rounds.max_draft) for length in lengths]
        return self._known_levels[drafter, batch]


def _missed(sequence: Sequence) -> int:
    """Count the tokens of a sequence that a model on the device must read before it can draft."""
    state = sequence.in_flight
    return len(state.unread(len(sequence.tokens)) or ()) if state.follower is not None else 0


def _best_of(speed: Seq[float]) -> int:
    """Return the draft length with the highest speed; 0 if no draft is worth while."""
    return speed.index(max(speed)) if max(speed) > WORTHWHILE * speed[0] else 0


def _pays(speed: Seq[float]) -> bool:
    """Return whether drafts of any length are faster than none; `speed`: with drafts of 0, 1, … tokens."""
    return max(speed) > speed[0]
