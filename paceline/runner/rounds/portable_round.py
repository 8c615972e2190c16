"""The part of a portable round that drafters work on, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from paceline.kernels import round_reference as ops
from paceline.kernels.base import Forward
from paceline.kernels.lookup_reference import copy_sure, lookup
from paceline.runner.heads.protocol import BlockForward, Head, HeadForward, ReadingHead
from paceline.runner.rounds.portable_growth import PortableGrowth
from paceline.runner.rounds.protocol import DeviceDrafter, Seat
from paceline.runner.rounds.rules import RoundRules
from paceline.runner.rounds.traits import passed_length, threshold_of
from paceline.runner.vocabulary import fit_logits

if TYPE_CHECKING:
    from paceline.runner.rounds.portable import PortableRounds


class PortableRound:
    """Implements DraftingRound. Seats whose limit is reached take no part in passes: their rows are zeros."""

    def __init__(
        self,
        rounds: PortableRounds,
        seats: Sequence[Seat],
        limits: list[int],
        copies: list[int],
        rules: RoundRules | None,
        drafter: str,
        by: DeviceDrafter,
    ) -> None:
        self._rules = rules
        self.state = rounds._state
        self._rounds = rounds
        self._limits = limits
        self._copies = copies
        self.longest = passed_length(by, max(self._limits), rounds.max_draft)
        self.lanes = rounds._rows.ints([seat.lane for seat in seats])
        self.found = rounds._rows.ints([0] * len(seats))
        self._thresholds = torch.tensor([threshold_of(by, seat) for seat in seats])
        self._sure = [seat.sure for seat in seats]
        self.matches = rounds._rows.ints([])  # int32 [seats] once somebody has looked
        self._ahead = self.lanes  # into which drafted tokens go: the dummy lane where copies stay
        self._head = rounds._states.draft(drafter, self.lanes, limits)  # None: the drafter has no taps
        self._growth: PortableGrowth | None = None  # None: the draft is a chain

    def limits(self) -> Tensor:
        return self._rounds._rows.ints(self._limits)

    def logits(self, model: Forward, turn: int, *, rows: int = 1) -> Tensor:
        wanting, vocab_size = self._wanting(turn), self._rounds._forward.vocab_size
        batch, _ = self._rounds._rows.of_seats(self.lanes[wanting], [rows] * len(wanting), first=turn - rows)
        last = batch.row_starts[1:] - 1
        logits = fit_logits(self._rounds._run(model, replace(batch, logit_rows=last)).logits, vocab_size=vocab_size)
        whole = logits.new_zeros(len(self._limits), vocab_size)
        whole[wanting] = logits
        return whole

    def masked(self, model: Forward, mask: int) -> Callable[[int], Tensor]:
        wanting, count, vocab_size = self._wanting(0), 2 * self.longest, self._rounds._forward.vocab_size
        lanes = self.lanes[wanting]
        ops.put_masks(self.state, lanes, mask, self.longest - 1)
        batch, _ = self._rounds._rows.of_seats(lanes, [count] * len(wanting), first=-self.longest - 1)
        told = self._rounds._run(model, batch).logits
        told = told.view(len(wanting), count, told.shape[1])[:, self.longest :]

        def logits(turn: int) -> Tensor:
            whole = told.new_zeros(len(self._limits), vocab_size)
            whole[wanting] = fit_logits(told[:, turn], vocab_size=vocab_size)
            return whole

        return logits

    def guess(self, head: Head, turn: int) -> Tensor:
        assert self._head is not None, "a drafter that runs a head has taps"
        if turn and self._growth is not None:
            return self._growth.guess(cast(HeadForward, head), turn, self._rounds._rows.page_table)
        return self._head.guess(head, turn)

    def block(self, head: ReadingHead) -> Callable[[int], Tensor]:
        assert self._head is not None, "a drafter that runs a head has taps"
        blocks, seats = self._head.block(cast(BlockForward, head)), self._head

        def logits(turn: int) -> Tensor:
            whole = torch.zeros(len(self._limits), len(head.ids))
            for seat in self._wanting(turn):
                if seat in blocks:
                    whole[seat] = blocks[seat].logits(turn, seats.last_token(seat, turn))[0]
            return whole

        return logits

    def last_states(self) -> Tensor:
        assert self._head is not None, "a drafter that reads hidden states has taps"
        return self._head.last()

    def append(self, logits: Tensor, turn: int, *, ids: Tensor | None = None, doubting: bool = False) -> None:
        wanting = self._wanting(turn)
        lanes, rules, doubt = self._ahead[wanting], self._rules, self._doubt(wanting, turn) if doubting else None
        if ids is not None and rules is not None:
            logits, ids = ops.spread(logits, ids, vocab=self._rounds._forward.vocab_size), None
        drawn, floors = torch.empty_like(lanes), torch.zeros(len(self._limits), device=logits.device)
        found, free = floors[wanting], None if rules is None else rules.free[wanting]
        options: dict[str, Any] = {"offset": turn, "push": True, "free": free, "floors": found}
        edited = self._rounds._draw(logits[wanting], lanes=lanes, out=drawn, ids=ids, doubt=doubt, **options)
        if doubt is not None and self._head is not None:
            self._head.confidence[wanting], self.found[wanting] = doubt.confidence, doubt.found
        if rules is not None:
            whole = torch.zeros_like(logits)
            whole[wanting], floors[wanting] = edited, found
            rules.keep(whole, floors, turn)

    def _doubt(self, seats: list[int], turn: int) -> ops.Doubt:
        assert self._head is not None, "only a drafter with taps can doubt its drafts"
        return ops.Doubt(
            confidence=self._head.confidence[seats],
            thresholds=self._thresholds[seats],
            limits=self.limits()[seats],
            found=self.found[seats],
            turn=turn,
        )

    def plant(self, *, width: int, levels: int) -> None:
        self._growth = PortableGrowth(self.state, self.lanes, limits=self.limits(), width=width, levels=levels)

    def branch(self, logits: Tensor, level: int, *, ids: Tensor | None = None, fitted: bool = True) -> None:
        assert self._growth is not None, "a tree must be planted first"
        assert self._head is not None, "only a drafter with taps can grow trees"
        rows = {"roots": self._head.confidence, "ends": self._head.ends, "thresholds": self._thresholds}
        self._growth.branch(logits, level, ids=ids, fitted=fitted, **rows)

    def prune(self) -> None:
        assert self._growth is not None, "a tree must be planted first"
        self._growth.prune(self.found)

    def look_up(self, *, min_ngram: int, max_ngram: int, predicted: bool = False) -> None:
        lookup(
            self.state,
            seats=self.lanes,
            limits=self.limits(),
            min_ngram=min_ngram,
            max_ngram=max_ngram,
            predicted=predicted,
            found=self.found,
        )

    def copy_sure(self, *, min_ngram: int, max_ngram: int, stays: bool = False) -> None:
        self.matches, ahead = torch.zeros_like(self.found), self.lanes.clone()
        copy_sure(
            self.state,
            seats=self.lanes,
            limits=self._rounds._rows.ints(self._copies),
            sure=self._rounds._rows.ints(self._sure),
            min_ngram=min_ngram,
            max_ngram=max_ngram,
            found=self.found,
            matches=self.matches,
            ahead=ahead,
        )
        self._ahead = ahead if stays else self._ahead

    def _wanting(self, turn: int) -> list[int]:
        """Seats that may have more than `turn` drafted tokens."""
        return [seat for seat, limit in enumerate(self._limits) if limit > turn]
