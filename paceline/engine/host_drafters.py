"""The drafters on the host: they hear of sequences, are asked for drafts, and learn what was accepted.

Both steppers use them: the host's asks and waits, the device's asks beside a step in flight (`engine.offers`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from paceline.drafters.base import Ask, Ended, Seen, Verified
from paceline.drafters.guard import Guard
from paceline.drafters.taps import columns
from paceline.engine.backlog import Backlog
from paceline.engine.governor import Governor
from paceline.engine.scheduler import Work
from paceline.engine.sequence import Sequence
from paceline.kernels.base import Output
from paceline.runner.lanes import Lanes
from paceline.runner.rounds.protocol import SPARE_OFFERED
from paceline.types import Off, OffKind


class HostDrafters:
    def __init__(
        self, guards: dict[str, Guard], *, lanes: Lanes, governor: Governor, taps: Seq[int], waits: bool
    ) -> None:
        """`guards`: drafters that do not run inside a device's rounds. `taps`: those whose hidden states the target's
        passes keep. `waits` False: steps are in flight, and nobody waits for a drafter on a thread of its own."""
        self.guards = guards
        self._lanes = lanes
        self._governor = governor
        self._waits = waits
        self._taps = taps
        self._readers: dict[int, str] = {}  # sequence → the drafter that reads its hidden states
        self._lost: dict[int, Off] = {}  # sequence → why its reader can no longer draft for it
        self._backlog = Backlog()  # states that the readers were not told of yet
        self.hearers = {name for name, guard in guards.items() if guard.hears_logits}
        self._columns = {
            name: columns(guard.taps, taps) for name, guard in guards.items() if guard.taps
        }  # drafter → function that selects its taps from the features of all taps

    def join(self, name: str, guard: Guard) -> None:
        """Take a drafter in between two steps. The target keeps the hidden states that it reads."""
        self.guards[name] = guard
        if guard.hears_logits:
            self.hearers.add(name)
        if guard.taps:
            self._columns[name] = columns(guard.taps, self._taps)

    def leave(self, name: str) -> None:
        """Let a drafter go that no sequence uses any more."""
        assert name not in self._readers.values(), f"a sequence still feeds {name}"
        del self.guards[name]
        self.hearers.discard(name)
        self._columns.pop(name, None)

    def start(self, sequence: Sequence) -> None:
        if self._backlog.used:
            self._settle()
        for name in sequence.drafters:
            if name in self.guards:
                self.guards[name].start(sequence.key, sequence.lane, self._view(sequence))
            if name in self._columns and self.guards[name].out is None:
                self._readers[sequence.key] = name

    def stop(self, sequence: Sequence) -> None:
        if sequence.finish is None:  # preempted: its pages are already another's
            self._backlog.forget(sequence.key)
        if self._backlog.used:
            self._settle()
        self._readers.pop(sequence.key, None)
        self._lost.pop(sequence.key, None)
        for name in sequence.drafters:
            if name in self.guards:
                if sequence.finish is not None:
                    ended = Ended(self._view(sequence), sequence.prompt_length, sequence.request.cache_salt)
                    self.guards[name].learn(ended)
                self.guards[name].stop(sequence.key)

    def asks(self, name: str, works: Seq[Work]) -> list[Ask]:
        """Ask a drafter for a draft after the committed tokens of each work, which is as long as the step can verify
        behind what is in flight. A predicted text goes on behind an edit."""
        governor, guard, grants = self._governor, self.guards[name], self._governor.grants
        beside = governor.batch if governor.copies_only or grants.unguarded else len(works)  # rows of the pass anyway
        row_prices = governor.row_prices(beside) if guard.ends_drafts else ()
        prices = governor.price(name), governor.row_price, row_prices, governor.plain_speed, governor.plain_share
        spare = SPARE_OFFERED if guard.needs_prediction and not self._waits else 0
        states = [work.sequence.in_flight for work in works]
        lengths = [state.most + work.max_draft + spare for state, work in zip(states, works, strict=True)]
        if not grants.worth:
            return [self._ask(work.sequence, length, *prices) for work, length in zip(works, lengths, strict=True)]
        apart = works[0].sequence.key in grants.unguarded  # all of the works are
        asks = []
        for work, length in zip(works, lengths, strict=True):
            worth = grants.worth.get(work.sequence.key, 1.0)
            asks.append(self._ask(work.sequence, length, *_divided(*prices, worth=worth, apart=apart)))
        return asks

    def _ask(
        self,
        sequence: Sequence,
        max_draft: int,
        price: float,
        row_price: float,
        row_prices: tuple[float, ...],
        plain_speed: float,
        plain_share: float,
    ) -> Ask:
        trail = sequence.trail
        return Ask(
            key=sequence.key,
            lane=sequence.lane,
            tokens=self._view(sequence),
            max_draft=max_draft,
            sampler=sequence.sampler,
            rule=sequence.request.speculation.rule,
            p_min=sequence.request.speculation.p_min,
            price=price,
            row_price=row_price,
            row_prices=row_prices,
            plain_speed=plain_speed,
            plain_share=plain_share,
            left=sequence.max_length - len(sequence.tokens),
            predicted=() if trail is None else trail.ahead(max_draft),
            matched=0 if trail is None else trail.matched,
            alone=len(sequence.drafters) == 1,
            salt=sequence.request.cache_salt,
            copies_only=self._governor.copies_only and sequence.key not in self._governor.grants.unguarded,
        )

    def observe(self, works: Seq[Work]) -> None:
        """Report how many tokens of their drafts were right, once the new tokens are committed."""
        for work in works if self.guards else ():
            sequence = work.sequence
            if work.drafted_from >= 0 and work.drafted and not work.forced and sequence.finish is None:
                right = len(sequence.tokens) - 1 - work.drafted_from  # the last token is the target's own
                self.guards[work.drafter or ""].observe(sequence.key, self._view(sequence), right)

    # ── logits ──

    def hear(self, works: Seq[Work], output: Output) -> None:
        """Tell drafters that hear logits what the target said after the last tokens and the drafts of their works."""
        for name in self.hearers:
            mine = [work for work in works if name in work.sequence.drafters and work.verdict is not None]
            told = [_verified(work, output) for work in mine if work.sequence.finish is None]
            if told:
                self.guards[name].hear(told)

    # ── hidden states ──

    def knows(self, sequence: Sequence, page: int) -> bool:
        """True if no drafter of the sequence needs hidden states of this page that it does not have."""
        if self._backlog.used:
            self._settle()
        readers = (self.guards[name] for name in sequence.drafters if name in self._columns)
        return all(guard.knows(page, wait=self._waits) for guard in readers)

    def may_ask(self, work: Work) -> bool:
        """Return whether the work's drafter has all hidden states that it needs to draft; if not, go plain."""
        sequence = work.sequence
        if work.drafter not in self._columns:
            return True
        if self._backlog.used:
            self._settle()
        assert sequence.span is not None
        lost = self._lost.get(sequence.key)
        if lost is None and sequence.span.committed < len(sequence.tokens) - 1:
            lost = Off(OffKind.BEHIND, "hidden states of the prompt are in flight")
        if lost is not None:
            work.go_plain(lost)
        return lost is None

    def reads(self, sequence: Sequence) -> bool:
        """True if a drafter reads the hidden states of this sequence."""
        return sequence.key in self._readers

    def hand_over(self, works: Seq[Work], *, crowded: bool) -> None:
        """Hand the hidden states that a device has sent with works to the drafters that read them."""
        sent, rows = [], 0
        for work in works if self._columns else ():
            if work.features is not None:
                work.first_row, rows = rows, rows + len(work.features)
                sent.append(work)
        if sent:
            features = torch.cat([work.features for work in sent if work.features is not None])
            self.feed(sent, features, crowded=crowded)

    def feed(self, works: Seq[Work], features: Tensor, *, crowded: bool) -> None:
        """Hand the hidden states of committed rows to the drafters that read them. While no head drafts, keep those of
        steps that only decode first, to hand them over together."""
        readers = self._readers
        reading = [work for work in works if work.sequence.key in readers and work.sequence.finish is None]
        if not reading:
            return
        rows = works[-1].first_row + works[-1].rows
        keeps = crowded and self._waits and rows == sum([1 + work.drafted for work in works])  # nothing of a prompt
        if keeps and self._backlog.add(reading, features, rows=rows):
            return
        if self._backlog.used:
            self._settle()
        if not (keeps and self._backlog.add(reading, features, rows=rows)):
            seen = [Seen(work.sequence.key, work.start, work.final_rows(work.first_row)) for work in reading]
            self._tell(features, seen, crowded=crowded)

    def _settle(self) -> None:
        """Hand over the states that were kept."""
        self._tell(*self._backlog.take(), crowded=True)

    def _tell(self, features: Tensor, seen: Seq[Seen], *, crowded: bool) -> None:
        by_reader: dict[str, list[Seen]] = {}
        for each in seen:
            by_reader.setdefault(self._readers[each.key], []).append(each)
        for name, parts in by_reader.items():
            guard = self.guards[name]
            lost = guard.feed(self._columns[name](features), parts, crowded=crowded, wait=self._waits)
            if lost:
                self._lost |= {key: why for key, why in lost.items() if key in self._readers}  # else it has ended
            for key in lost if guard.out is None else [each.key for each in parts]:
                self._readers.pop(key, None)

    def _view(self, sequence: Sequence) -> np.ndarray:
        """Return the committed tokens of a sequence, read-only: drafters are not trusted."""
        return self._lanes.view(sequence.lane, len(sequence.tokens))


def _verified(work: Work, output: Output) -> Verified:
    sequence, rows = work.sequence, slice(work.root, work.root + 1 + len(work.draft.tokens))
    token, best = sequence.tokens[work.start + work.count - 1], output.argmax[rows].tolist()
    return Verified(sequence.key, sequence.request.cache_salt, token, work.draft, output.logits[rows], best)


def _divided(
    price: float,
    row_price: float,
    row_prices: tuple[float, ...],
    plain_speed: float,
    plain_share: float,
    *,
    worth: float,
    apart: bool,
) -> tuple[float, float, tuple[float, ...], float, float]:
    """Return prices and speeds for a request of this worth. `apart`: no other request is asked for in the same call,
    so that what the call costs may be weighed against this one's speed."""
    rows = tuple([each / worth for each in row_prices])
    return price / worth, row_price / worth, rows, plain_speed / worth if apart else plain_speed, plain_share
