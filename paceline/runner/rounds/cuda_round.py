"""One captured round on a CUDA device: draft, verify, draw and accept, for the steps of one bucket.

A round is a sequence of launches over memory that keeps its address, so that it can be captured as a CUDA graph and
replayed. Without a graph it runs the same launches one by one. A round with grammars is captured in three pieces: its
tokens are drawn once the host, which has read the drafts meanwhile, has sent the masks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.cuda import score
from paceline.kernels.cuda.clock import stamp
from paceline.kernels.cuda.compiling import rehearsal
from paceline.kernels.cuda.edit import count, edit, raw_rows
from paceline.kernels.cuda.offer import offer
from paceline.kernels.cuda.rounds import accept
from paceline.kernels.cuda.sample import draw
from paceline.kernels.cuda.states import hold
from paceline.kernels.cuda.tree import tree_accept, tree_layout, tree_move
from paceline.kernels.cuda.ways import without_comparing
from paceline.kernels.offer_reference import HEADER
from paceline.kernels.states_reference import HeldStates
from paceline.runner.forwards.cuda import CudaForward
from paceline.runner.forwards.device_batch import DeviceBatch
from paceline.runner.rounds.alignment import aligned
from paceline.runner.rounds.buckets import Bucket
from paceline.runner.rounds.cuda_draft import ASKED, CudaDraft
from paceline.runner.rounds.device_state import DeviceState
from paceline.runner.rounds.outcomes import MAX_IN_FLIGHT, Fetched, Outcomes
from paceline.runner.rounds.protocol import SPARE_OFFERED, DeviceDrafter, Seat, write_offer
from paceline.runner.rounds.recorder import Recorder
from paceline.runner.rounds.round_states import RoundStates
from paceline.runner.rounds.rules import Judge
from paceline.runner.rounds.scores import Pairs, Verified, score_new
from paceline.runner.rounds.traits import drafts_trees, taps_of, threshold_of
from paceline.runner.rounds.upload import MaskTable, download
from paceline.sampling.words import MaskSheet


class CudaRound(CudaDraft):
    """The launches of one bucket, with all memory that they use between passes."""

    def __init__(
        self,
        bucket: Bucket,
        state: DeviceState,
        target: CudaForward,
        drafter: DeviceDrafter | None,
        held: HeldStates | None,
        synthetic_acceptance: float,
        *,
        max_draft: int,
        judge: Judge | None = None,
        recorder: Recorder | None = None,
        masks: MaskTable | None = None,
    ) -> None:
        """`held`: the hidden states of a drafter with taps. `masks`: memory for the masks of a bucket that has some."""
        self._drafter = drafter
        self._synthetic_acceptance = synthetic_acceptance
        self._recorder = recorder
        self._graphs: list[torch.cuda.CUDAGraph] = []  # one for each piece, once they are recorded
        self._masks = masks
        seats, device = bucket.seats, state.device
        # What the host sends for a step: numbers of the seats [ASKED, seats], see `CudaDraft`, then its offers, a row
        # for each seat.
        # An offer has room for what a step in flight may commit (max_draft + 1 tokens), for the draft after it, and for
        # tokens behind an edit.
        width = HEADER + max_draft + 1 + bucket.offers + SPARE_OFFERED if bucket.offers else 0
        self._offers_at = ASKED * aligned(seats)
        self._sent = torch.zeros(self._offers_at + seats * width, dtype=torch.int32, device=device)
        super().__init__(self._sent[: self._offers_at].view(ASKED, -1)[:, :seats], bucket, state, target, held)
        self._offers = self._sent[self._offers_at :].view(seats, width)
        rows = len(self._rows[0])
        self._targets = torch.zeros(rows, dtype=torch.int32, device=device)
        self.tree = bucket.draft > 0 and drafts_trees(drafter)
        shape = (rows if self.tree else 0, bucket.longest)
        self._tails, self._ancestors = (torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(2))
        self._leads, self._bases = (torch.zeros(n, dtype=torch.int32, device=device) for n in (rows, seats))
        self._outcomes = Outcomes(bucket, device, tree=self.tree)
        _, self._out, self._stamps, self._scores, self._matches = self._outcomes.device
        self._pairs = Pairs.empty(seats, 1 + bucket.longest, device)
        self._taps = () if drafter is None else tuple(taps_of(drafter))
        if bucket.tapped:  # for the host, the target's taps come after those of the drafter
            self._taps = (*self._taps, *target.taps)
            self._kept = target.decoder.memory_for(self._taps, bucket.rows)
        self._asks = _host_memory(self._sent)
        # Copies of rows and ancestors for the host, which reads them before the next round.
        laid = self._laid[: aligned(seats + 1) + bucket.rows]
        self._rows_read = _host_memory(laid)[0] if masks and bucket.longest else None
        self._ancestors_read = _host_memory(self._ancestors)[0] if masks and self.tree else None
        self._last: Sequence[Seat] | None = None
        self._batch_of_draft: DeviceBatch | None = None  # rows of the verification
        self._logits: Tensor | None = None  # of the verification
        self._judge = judge

    @property
    def recorded(self) -> bool:
        return bool(self._graphs)

    @rehearsal()
    def run_once(self) -> None:
        """Run on the dummy lane, so that every kernel is compiled and every buffer exists."""
        for piece in self._pieces():
            piece()

    @without_comparing()
    def record(self) -> None:
        """Record the launches, to be replayed from now on. The round has run before."""
        assert self._recorder is not None, "rounds without graphs are not recorded"
        self._graphs = [self._recorder(piece) for piece in self._pieces()]

    def begin(self, seats: Sequence[Seat]) -> None:
        """Say whose round it is. Without masks, nothing is launched yet."""
        if seats != self._last:
            self._ask(seats)

    def draft(self) -> tuple[Tensor | None, Tensor | None]:
        """Launch the drafts of a round with masks. Return, in the host's memory and valid from when the device has come
        so far until the next launch of the round, where the rows of each seat begin, then the token of each row; and
        the ancestors of the rows of a tree."""
        self._launch(0)
        return self._rows_read, self._ancestors_read

    def verify(self) -> None:
        """Launch the pass of the target in a round with masks."""
        self._launch(-2)

    def sheet(self) -> MaskSheet:
        """Return an empty sheet for the masks of a round."""
        assert self._masks is not None, "the bucket has no masks"
        return self._masks.sheet()

    def mask(self, sheet: MaskSheet, void: Collection[int]) -> None:
        """Set the masks of rows. Seats that are `void` draw nothing: their lanes stay as they are."""
        sheet.settle()
        for seat in void:
            self._asked[0, seat].fill_(self.state.dummy)
        self._last = None if void else self._last

    def end(self) -> Fetched:
        """Launch the rest of the round. Its outcome, in the host's memory, is valid once the step is done."""
        self._launch(-1)
        return self._outcomes.fetch()

    def tapped_states(self) -> RoundStates | None:
        """Copy hidden states at the target's taps from the latest launch to the host; None: no seat wants them."""
        if not self._bucket.tapped or self._kept is None:
            return None
        width = len(self._target.taps) * self._target.decoder.config.hidden_size
        states = self._kept[:, self._kept.shape[1] - width :].contiguous()
        return RoundStates(download(states), download(self._starts))

    def _ask(self, seats: Sequence[Seat]) -> None:
        self._asks.rotate()
        sent, count = self._asks[0].numpy(), self._bucket.seats
        lanes, wanted, limits, thresholds, copies, sure = sent[: self._offers_at].reshape(ASKED, -1)[:, :count]
        lanes[:], wanted[:], limits[:], copies[:], sure[:] = self.state.dummy, 1, 0, 0, 0
        offers = sent[self._offers_at :].reshape(self._offers.shape)
        offers[:, :HEADER] = 0
        lanes[: len(seats)] = [seat.lane for seat in seats]
        limits[: len(seats)] = [0 if seat.offer else min(seat.max_draft, self._bucket.draft) for seat in seats]
        wanted += limits
        if self._bucket.copies:
            most = self._bucket.copies
            copies[: len(seats)] = [min(seat.max_copy, most) for seat in seats]
            sure[: len(seats)] = [seat.sure for seat in seats]
        for i, seat in enumerate(seats):
            if seat.offer is not None:
                write_offer(offers[i], seat.offer, most=min(seat.max_draft, self._bucket.offers))
        if self._drafter is not None:
            thresholds.view(np.float32)[: len(seats)] = [threshold_of(self._drafter, seat) for seat in seats]
        self._sent.copy_(self._asks[0], non_blocking=True)
        if self._rules is not None:
            self._rules.ask(seats)
        self._last = list(seats)

    def _pieces(self) -> list[Callable[[], None]]:
        """List the parts of the round that are launched one by one."""
        if self._masks is None:
            return [self._run]
        return [self._lay_out_draft, self._verify, self._end] if self._bucket.longest else [self._pass, self._end]

    def _launch(self, index: int) -> None:
        if self._graphs:
            self._graphs[index].replay()
        else:
            with without_comparing():
                self._pieces()[index]()

    def _run(self) -> None:
        self._pass()
        self._end()

    def _pass(self) -> None:
        self._lay_out_draft()
        self._verify()

    def _lay_out_draft(self) -> None:
        """Draft, and lay out the rows of the verification."""
        bucket, state, pdl = self._bucket, self.state, self._pdl
        self._stamp(0)
        if self._rules is not None:
            self._rules.begin()
        self._draft()
        self._stamp(1)
        if self._drafter is None or not self._drafter.finds_fewer or not bucket.runs_drafter:
            self._counts.copy_(self._asked[1])
        if bucket.offers:
            offer(state, seats=self._asked[0], offers=self._offers, counts=self._counts, pdl=pdl)
        self._batch_of_draft = self._make_rows()
        if self._rows_read is not None:
            self._rows_read.copy_(self._laid[: len(self._rows_read)], non_blocking=True)
        if self._ancestors_read is not None:
            self._ancestors_read.copy_(self._ancestors, non_blocking=True)

    def _verify(self) -> None:
        """Run the target over the rows."""
        assert self._batch_of_draft is not None, "the rows were not laid out"
        rows, taps = self._batch_of_draft, self._taps
        self._logits = self._target.decoder.logits(rows, self._target.kv, taps=taps, kept=self._kept)

    def _end(self) -> None:
        """Edit logits, draw tokens and accept."""
        bucket, state, pdl, rows, logits = self._bucket, self.state, self._pdl, self._batch_of_draft, self._logits
        assert rows is not None, "the rows were not laid out"
        assert logits is not None, "the rows were not verified"
        self._stamp(2)
        targets, owners = self._targets[: bucket.rows], self._rows[3][: bucket.rows]
        raw = raw_rows(bucket.rows, logits.shape[1], state.device) if bucket.edits or bucket.masks else None
        if raw is not None:
            edit(
                logits,
                state,
                lanes=owners,
                positions=rows.positions,
                offset=1,
                ancestors=self._ancestors[: bucket.rows] if self.tree else None,
                raw=raw,
                masks=None if self._masks is None else self._masks.masks,
                pdl=pdl,
            )
        draw(
            logits,
            state,
            lanes=owners,
            positions=rows.positions,
            offset=1,
            out=targets,
            floors=None if self._floors is None else self._floors[: bucket.rows],
            pdl=pdl,
        )
        self._accept(targets, self._verdicts(logits, rows, targets))
        if bucket.edits:
            count(state, seats=self._asked[0], outcomes=self._out, pdl=pdl)
        if self._scores is not None:
            verified = Verified(logits, self._out, self._asked[0], self._starts, owners, raw, self.tree)
            score_new(score, verified, state, self._pairs, self._scores, pdl=pdl)
        self._hold()
        self._stamp(3)

    def _accept(self, targets: Tensor, verdicts: Tensor | None) -> None:
        """Commit what the target agrees with; keys and values of a path through a tree move to their positions."""
        accepting = tree_accept if self.tree else accept
        accepting(
            self.state,
            seats=self._asked[0],
            targets=targets,
            out=self._out,
            row_starts=self._starts,
            verdicts=verdicts,
            synthetic_acceptance=self._synthetic_acceptance,
            pdl=self._pdl,
        )
        if self.tree:
            tree_move(self.state, self._target.kv, seats=self._asked[0], out=self._out, pdl=self._pdl)

    def _hold(self) -> None:
        """Hold the hidden states of the rows that were accepted, for the drafter's next draft."""
        if self._held is None or self._kept is None:
            return
        hold(
            self._held,
            self.state,
            seats=self._asked[0],
            starts=self._starts,
            outcomes=self._out,
            features=self._kept,
            read=self._asked[2] if self._bucket.draft else None,
            tree=self.tree,
            pdl=self._pdl,
        )

    def _verdicts(self, logits: Tensor, rows: DeviceBatch, targets: Tensor) -> Tensor | None:
        """Let the rules of the seats judge their drafts; None: the coupled rule judges all of them."""
        if self._rules is None or self._judge is None or self._floors is None:
            return None
        return self._rules.judge(
            self._judge,
            logits,
            self._floors,
            tokens=rows.tokens,
            positions=rows.positions,
            targets=targets,
            row_starts=self._starts,
            tree=self.tree,
        )

    def _draft(self) -> None:
        if self._drafter is not None and self._bucket.runs_drafter:
            self._drafter.draft(self)
            if self._drafter.finds_fewer:
                self._counts.add_(1)  # from tokens found to rows of the verification

    def _make_rows(self) -> DeviceBatch:
        """Lay out the rows of the verification: the last committed token of each seat and its chain or tree."""
        rows, longest = self._bucket.rows, self._bucket.longest
        if not self.tree:
            return self._lay_out(self._counts, first=-1, rows=rows, longest=1 + longest)
        tokens, positions, slots, owners = (part[:rows] for part in self._rows)
        tails, leads = self._tails[:rows], self._leads[:rows]
        tree_layout(
            self.state,
            seats=self._asked[0],
            counts=self._counts,
            tokens=tokens,
            positions=positions,
            slots=slots,
            owners=owners,
            row_starts=self._starts,
            bases=self._bases,
            tails=tails,
            leads=leads,
            ancestors=self._ancestors[:rows],
            pdl=self._pdl,
        )
        batch = self._batch(tokens, positions, slots, self._starts, 1 + longest)
        return replace(batch, bases=self._bases, tails=tails, leads=leads)

    def _stamp(self, index: int) -> None:
        if self._stamps is not None and self._stamps.is_cuda:
            stamp(self._stamps, index, pdl=self._pdl)


def _host_memory(like: Tensor) -> deque[Tensor]:
    """Make memory of the host for each step in flight, in one piece: each that a device can reach takes long."""
    pinned = like.device.type == "cuda"
    return deque(torch.zeros((MAX_IN_FLIGHT, *like.shape), dtype=like.dtype, pin_memory=pinned).unbind())
