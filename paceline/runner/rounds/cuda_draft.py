"""The part of a round on a CUDA device that drafters work on, over memory that keeps its address."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.kernels.base import Forward
from paceline.kernels.cuda.edit import edit
from paceline.kernels.cuda.lookup import copy_sure, lookup
from paceline.kernels.cuda.rounds import layout
from paceline.kernels.cuda.sample import draw
from paceline.kernels.cuda.states import take
from paceline.kernels.round_reference import Doubt, put_masks, spread
from paceline.kernels.states_reference import HeldStates, Taken, last
from paceline.runner.forwards.cuda import CudaForward
from paceline.runner.forwards.device_batch import DeviceBatch
from paceline.runner.heads.cuda import CudaHead
from paceline.runner.heads.cuda_block import CudaBlock
from paceline.runner.heads.protocol import Head, ReadingHead
from paceline.runner.rounds.alignment import places
from paceline.runner.rounds.buckets import Bucket
from paceline.runner.rounds.cuda_growth import CudaGrowth
from paceline.runner.rounds.device_state import DeviceState
from paceline.runner.rounds.rules import RoundRules
from paceline.runner.rounds.traits import SPARE_STATES

ASKED = 6  # numbers that the host sends for each seat


class CudaDraft:
    """Implements DraftingRound for the seats of one bucket."""

    def __init__(
        self, asked: Tensor, bucket: Bucket, state: DeviceState, target: CudaForward, held: HeldStates | None
    ) -> None:
        """`asked` int32 [ASKED, seats]: lanes, rows wanted, drafted tokens wanted, bits of the drafts' thresholds,
        copied tokens wanted, and tokens of a match that is sure. `held`: the hidden states of a drafter with taps."""
        self._asked = asked
        self._bucket = bucket
        self.state = state
        self.longest = bucket.draft
        self._target = target
        self._pdl = target.decoder.pdl
        seats, rows = bucket.seats, max(bucket.rows, 2 * bucket.seats)
        device = state.device
        asked[0] = state.dummy
        asked[1] = 1 + bucket.draft
        asked[2] = bucket.draft
        asked[4] = bucket.copies
        asked[5] = int(bucket.copies > 0)
        self._counts, self._drawn = (torch.zeros(seats, dtype=torch.int32, device=device) for _ in range(2))
        self._same_counts = {rows: torch.full_like(self._counts, rows) for rows in (1, 2)}  # rows of a draft pass
        self._wide: tuple[Tensor, Sequence[Tensor]] | None = None  # counts and rows over masks; None: no pass ran
        where, total = places([seats + 1, *[rows] * 4])
        self._laid = torch.zeros(total, dtype=torch.int32, device=device)
        self._starts, *columns = (self._laid[place] for place in where)
        self._rows = columns  # tokens, positions, slots and owners of rows
        self._growth: CudaGrowth | None = None  # None: no tree has been planted
        self._matches: Tensor | None = None  # int32 [seats]; None: nobody looks in this round
        # Lanes into which drafted tokens go; other than the seats' own where copies stay.
        self._ahead: Tensor | None = None
        self._held = held
        self._taken: Taken | None = None  # rows of a head's first pass
        self._kept: Tensor | None = None  # [rows, width] hidden states of the verified rows
        if held is not None:
            self._hold_states(held)
        self._rules = self._make_rules(target.vocab_size)
        self._floors = torch.zeros(rows, device=device) if self._rules else None

    def _hold_states(self, held: HeldStates) -> None:
        """Find memory for the hidden states of the verified rows, and for the rows of a head's first pass. Rounds share
        it, because they run one after the other."""
        bucket, device = self._bucket, self.state.device
        self._kept = held.buffer("kept", bucket.rows)
        if bucket.draft:
            features, turns = held.buffer("features", bucket.rows), bucket.draft - 1
            taken = Taken.empty(seats=bucket.seats, rows=bucket.rows, turns=turns, features=features, device=device)
            self._taken = replace(taken, found=self._counts)
            self._singles = torch.arange(bucket.seats + 1, dtype=torch.int32, device=device)  # one row for each seat

    def _make_rules(self, vocab: int) -> RoundRules | None:
        bucket = self._bucket
        if not bucket.rules:
            return None
        rules = RoundRules(
            bucket.rules, bucket.judged, seats=bucket.seats, longest=bucket.longest, vocab=vocab, state=self.state
        )
        rules.attend(self._asked[0])
        return rules

    @property
    def lanes(self) -> Tensor:
        return self._asked[0]

    @property
    def found(self) -> Tensor:
        return self._counts

    def limits(self) -> Tensor:
        return self._asked[2]

    def logits(self, model: Forward, turn: int, *, rows: int = 1) -> Tensor:
        forward = on_cuda(model)
        laid = self._lay_out(self._same_counts[rows], first=turn - rows, rows=rows * self._bucket.seats, longest=rows)
        return forward.decoder.logits(laid, forward.kv, every=rows)[:, : self._target.vocab_size]

    def masked(self, model: Forward, mask: int) -> Callable[[int], Tensor]:
        forward, seats, count = on_cuda(model), self._bucket.seats, 2 * self.longest
        put_masks(self.state, self.lanes, mask, self.longest - 1)
        if self._wide is None:  # else the same launches run again
            memory = torch.zeros((4, seats * count), dtype=torch.int32, device=self.state.device)
            self._wide = torch.full_like(self._counts, count), memory.unbind()
        counts, columns = self._wide
        laid = self._lay_out(counts, first=-self.longest - 1, rows=seats * count, longest=count, columns=columns)
        states = forward.decoder.hidden(laid, forward.kv).view(seats, count, -1)[:, self.longest :]
        states = states.transpose(0, 1).contiguous()  # [drafted tokens, seats, hidden]
        return lambda turn: forward.decoder.project(states[turn])[:, : self._target.vocab_size]

    def guess(self, head: Head, turn: int) -> Tensor:
        assert isinstance(head, CudaHead), f"rounds on a CUDA device run CudaHeads, not a {type(head).__name__}"
        if turn == 0:
            return head.first(*self._take())
        if self._growth is not None:
            return head.further(self._growth.rows(turn), turn, ends=self._growth.ends)
        assert self._taken is not None, "the first pass has not run"
        later = self._taken.later_positions[turn - 1], self._taken.later_slots[turn - 1]
        return head.further(self._batch(self._drawn, *later, self._singles, 1), turn)

    def block(self, head: ReadingHead) -> Callable[[int], Tensor]:
        assert isinstance(head, CudaBlock), f"rounds on a CUDA device run CudaBlocks, not a {type(head).__name__}"
        head.read(*self._take())
        anchors = head.run(self.state, self.lanes, context=self._bucket.context, tokens=self.longest)
        return lambda turn: head.logits_after(turn, self._drawn if turn else anchors)

    def _take(self) -> tuple[DeviceBatch, Tensor]:
        """Lay out the held states of all seats, which a head reads first: rows and states."""
        held, taken = self._held, self._taken
        if held is None or taken is None:
            raise TypeError("a drafter that runs a head names its taps")
        most = held.capacity - SPARE_STATES  # more would be more than one block of attention
        take(held, self.state, seats=self.lanes, limits=self.limits(), most=most, into=taken, pdl=self._pdl)
        return self._batch(taken.tokens, taken.positions, taken.slots, taken.row_starts, most), taken.features

    def last_states(self) -> Tensor:
        if self._held is None or self._taken is None:
            raise TypeError("a drafter that reads hidden states names its taps")
        states, there = last(self._held, self.state, seats=self.lanes)
        self._taken.confidence.copy_(torch.where(there, 1.0, -1.0))
        self._counts.zero_()
        return states

    def append(self, logits: Tensor, turn: int, *, ids: Tensor | None = None, doubting: bool = False) -> None:
        doubt = None
        if doubting:
            assert self._taken is not None, "only a drafter with taps can doubt its drafts"
            thresholds = self._asked[3].view(torch.float32)
            doubt = Doubt(self._taken.confidence, thresholds, self._asked[2], self._counts, turn)
        if ids is not None and self._rules is not None:
            logits, ids = spread(logits, ids, vocab=self._target.vocab_size), None
        if self._bucket.edits:
            edit(logits, self.state, lanes=self._asked[0], offset=turn, ids=ids, pdl=self._pdl)
        floors = None if self._floors is None else self._floors[: len(logits)]
        draw(
            logits,
            self.state,
            lanes=self._asked[0] if self._ahead is None else self._ahead,
            offset=turn,
            out=self._drawn,
            push=True,
            ids=ids,
            doubt=doubt,
            free=None if self._rules is None else self._rules.free,
            floors=floors,
            pdl=self._pdl,
        )
        if self._rules is not None and floors is not None:
            self._rules.keep(logits, floors, turn)

    def plant(self, *, width: int, levels: int) -> None:
        if self._growth is None:  # else the same launches run again
            self._growth = CudaGrowth(
                self.state,
                self.lanes,
                limits=self.limits(),
                thresholds=self._asked[3].view(torch.float32),
                width=width,
                levels=levels,
                context=self._bucket.context,
                pdl=self._pdl,
            )

    def branch(self, logits: Tensor, level: int, *, ids: Tensor | None = None, fitted: bool = True) -> None:
        assert self._growth is not None, "a tree must be planted first"
        assert self._taken is not None, "only a drafter with taps can grow trees"
        roots, ends = self._taken.confidence, self._taken.row_starts
        self._growth.branch(logits, level, ids=ids, fitted=fitted, roots=roots, ends=ends)

    def prune(self) -> None:
        assert self._growth is not None, "a tree must be planted first"
        self._growth.prune(self.found)

    def look_up(self, *, min_ngram: int, max_ngram: int, predicted: bool = False) -> None:
        lookup(
            self.state,
            seats=self._asked[0],
            limits=self.limits(),
            min_ngram=min_ngram,
            max_ngram=max_ngram,
            predicted=predicted,
            found=self._counts,
            pdl=self._pdl,
        )

    def copy_sure(self, *, min_ngram: int, max_ngram: int, stays: bool = False) -> None:
        if self._matches is None:
            return
        if stays and self._ahead is None:  # else the same launches run again
            self._ahead = torch.zeros_like(self._counts)
        copy_sure(
            self.state,
            seats=self._asked[0],
            limits=self._asked[4],
            sure=self._asked[5],
            min_ngram=min_ngram,
            max_ngram=max_ngram,
            found=self._counts,
            matches=self._matches,
            ahead=self._ahead,
            pdl=self._pdl,
        )

    def _lay_out(
        self, counts: Tensor, *, first: int, rows: int, longest: int, columns: Sequence[Tensor] = ()
    ) -> DeviceBatch:
        tokens, positions, slots, owners = (part[:rows] for part in columns or self._rows)
        layout(
            self.state,
            seats=self._asked[0],
            counts=counts,
            first=first,
            tokens=tokens,
            positions=positions,
            slots=slots,
            owners=owners,
            row_starts=self._starts,
            pdl=self._pdl,
        )
        return self._batch(tokens, positions, slots, self._starts, longest)

    def _batch(self, tokens: Tensor, positions: Tensor, slots: Tensor, starts: Tensor, longest: int) -> DeviceBatch:
        return DeviceBatch(
            tokens=tokens,
            positions=positions,
            slots=slots,
            row_starts=starts,
            page_table=self.state.pages,
            lanes=self._asked[0],
            seats=self._bucket.seats,
            max_rows=longest,
            max_context=self._bucket.context,
        )


def on_cuda(model: Forward) -> CudaForward:
    """Check that rounds on a CUDA device can run a drafter's model."""
    if not isinstance(model, CudaForward):
        raise TypeError(f"rounds on a CUDA device run models that are CudaForwards, not {type(model).__name__}")
    return model
