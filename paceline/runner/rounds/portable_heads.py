"""Heads in portable rounds: the hidden states that are held for them, and their passes, in plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from paceline.kernels import states_reference as states
from paceline.kernels.base import PAGE_SIZE, Batch, Forward, Output
from paceline.runner.heads.protocol import Anchor, BlockForward, BlockRows, Head, HeadForward, StateReader
from paceline.runner.rounds.device_state import DeviceState
from paceline.runner.rounds.protocol import DeviceDrafter
from paceline.runner.rounds.traits import added_by, head_of, held_for, network_of, taps_of


class PortableStates:
    """The hidden states of every drafter that reads them. Drafters of another kind, and None, hold nothing."""

    def __init__(
        self, forward: Forward, state: DeviceState, drafters: Mapping[str, DeviceDrafter], *, max_draft: int
    ) -> None:
        self._taps = forward.taps
        self._state = state
        self._drafters = {name: by for name, by in drafters.items() if taps_of(by)}
        holders = [name for name in self._drafters if network_of(name, drafters) == name]
        self._max_draft = max_draft
        hidden = forward.embed(torch.zeros(1, dtype=torch.int32)).shape[1] if self._drafters else 0
        held = {
            name: states.HeldStates.empty(
                table,
                capacity=held_for(name, drafters, max_draft),
                width=len(taps_of(drafters[name])) * hidden,
                dtype=torch.float32,
            )
            for name, table in zip(holders, state.held, strict=True)
        }
        self._held = {name: held[network_of(name, drafters)] for name in self._drafters}

    def hold(
        self,
        drafter: str | None,
        features: Tensor | None,
        *,
        seats: Tensor,
        starts: Tensor,
        outcomes: Tensor,
        read: Tensor | None = None,
        tree: bool = False,
    ) -> None:
        """Hold the states of rows that were just committed, see `states_reference.hold`; features have all taps."""
        if drafter in self._held and features is not None:
            own = self._columns(drafter or "", features)
            held = self._held[drafter or ""]
            rows = {"seats": seats, "starts": starts, "outcomes": outcomes}
            states.hold(held, self._state, features=own, read=read, tree=tree, pdl=False, **rows)

    def show(self, drafter: str | None, features: Tensor | None, batch: Batch, rows: Sequence[int]) -> None:
        """Let a head read `rows` of a pass, which are the rows of `batch`, each with its next token."""
        head = head_of(self._drafters[drafter]) if drafter in self._drafters and drafter else None
        if head is not None and features is not None and rows:
            cast(StateReader, head)(batch, features=self._columns(drafter or "", features)[list(rows)])

    def catch_up(self, drafter: str | None, lanes: Sequence[int]) -> None:
        """Let a head read all held states of lanes but the last, which a draft begins with."""
        if drafter in self._held and drafter and lanes:
            held, seats = self._held[drafter], torch.tensor(lanes, dtype=torch.int32)
            late = HeadDraft(self._state, held, seats, [1] * len(lanes), most=held.capacity)
            late.read_held(cast(StateReader, head_of(self._drafters[drafter])))
            held.counts[seats.long()] = held.counts[seats.long()].clamp(max=1)

    def draft(self, drafter: str, lanes: Tensor, limits: list[int]) -> HeadDraft | None:
        """Begin a draft for the seats of a round; None: the drafter reads no hidden states."""
        if drafter not in self._held:
            return None
        most = added_by(self._drafters[drafter], self._max_draft)
        return HeadDraft(self._state, self._held[drafter], lanes, limits, most=most)

    def _columns(self, drafter: str, features: Tensor) -> Tensor:
        """Select the taps of one drafter from the features of all taps."""
        kept = features.chunk(len(self._taps), dim=1)
        return torch.cat([kept[self._taps.index(tap)] for tap in taps_of(self._drafters[drafter])], dim=1)


class HeadDraft:
    """The passes of a head for the seats of one round."""

    def __init__(
        self, state: DeviceState, held: states.HeldStates, lanes: Tensor, limits: list[int], *, most: int
    ) -> None:
        """`most`: held states of a seat that the first pass reads."""
        self._state, self._held, self._lanes, self._limits, self._most = state, held, lanes, limits, most
        self.confidence = torch.full((len(limits),), -1.0)
        self._rows: list[int] = []  # row of each seat in the last pass; -1: none

    def guess(self, head: Head, turn: int) -> Tensor:
        """Run the head after `turn` tokens, as DraftingRound.guess defines it."""
        forward = cast(HeadForward, head)
        whole = torch.zeros(len(self._limits), len(head.ids))
        if turn == 0 and (read := self.read_held(forward)) is not None:
            logits = cast(Output, read).logits
        seats = [seat for seat, limit in enumerate(self._limits) if limit > turn and self._rows[seat] >= 0]
        if turn and seats:
            logits = self._continue(forward, seats, turn)
        if seats:
            whole[seats] = logits
        return whole

    @property
    def ends(self) -> Tensor:
        """Return the ends of the seats' rows in the last pass, int32 [seats + 1]."""
        rows = self._rows or [0] * len(self._limits)
        return torch.tensor([0, *(row + 1 for row in rows)], dtype=torch.int32)

    def last(self) -> Tensor:
        """Return the last held state of each seat."""
        found, there = states.last(self._held, self._state, seats=self._lanes)
        self.confidence = torch.where(there, 1.0, -1.0)
        return found

    def block(self, head: BlockForward) -> dict[int, BlockRows]:
        """Read the held states of all seats, and run a block for each that has any and may draft."""
        self.read_held(head)
        seats = [seat for seat, limit in enumerate(self._limits) if limit and self._rows[seat] >= 0]
        return dict(zip(seats, head.blocks([self._anchor(seat) for seat in seats]), strict=True)) if seats else {}

    def last_token(self, seat: int, turn: int) -> int:
        """Return the last token of a seat after `turn` drafted ones."""
        lane = int(self._lanes[seat])
        return int(self._state.tokens[lane, int(self._state.lengths[lane]) - 1 + turn])

    def _anchor(self, seat: int) -> Anchor:
        lane = int(self._lanes[seat])
        position = int(self._state.lengths[lane]) - 1
        pages = self._state.pages[lane, : -(-position // PAGE_SIZE)].tolist()
        return Anchor(self.last_token(seat, 0), position, pages, self._limits[seat])

    def read_held(self, head: StateReader) -> object | None:
        """Let a head read the held states of all seats, and ask for logits of the last row of each that has any. Return
        its output; None: nothing is held."""
        count, held = len(self._limits), self._held
        most, device = count * held.capacity, self._state.device
        features = held.states.new_zeros((most, held.width))
        rows = states.Taken.empty(seats=count, rows=most, turns=0, features=features, device=device)
        limits = torch.tensor(self._limits)
        states.take(held, self._state, seats=self._lanes, limits=limits, most=self._most, into=rows)
        self.confidence = rows.confidence
        starts = rows.row_starts.tolist()
        self._rows = [stop - 1 if stop > start else -1 for start, stop in itertools.pairwise(starts)]
        there = [seat for seat, row in enumerate(self._rows) if row >= 0]
        if not there:
            return None
        used = slice(0, starts[-1])
        ends = [self._rows[seat] + 1 for seat in there]
        batch = self._batch(there, rows.tokens[used], rows.positions[used], ends=ends)
        return head(batch, features=rows.features[used])

    def _continue(self, head: HeadForward, seats: list[int], turn: int) -> Tensor:
        """Continue from the last row of each of these seats, with the token that was drafted last."""
        lanes = self._lanes[seats].long()
        positions = self._state.lengths[lanes] - 2 + turn
        tokens = self._state.tokens[lanes, positions.long() + 1]
        batch = self._batch(seats, tokens, positions, ends=[*range(1, len(seats) + 1)])
        logits = head(batch, carry=[self._rows[seat] for seat in seats]).logits
        self._rows = [seats.index(seat) if seat in seats else -1 for seat in range(len(self._limits))]
        return logits

    def _batch(self, seats: list[int], tokens: Tensor, positions: Tensor, *, ends: list[int]) -> Batch:
        """Make a batch of rows, those of each seat up to `ends`, with logits of the last row of each."""
        starts = torch.tensor([0, *ends], dtype=torch.int32)
        lanes = self._lanes[seats].long()
        owners = lanes.repeat_interleave(starts.diff())
        slots = self._state.pages[owners, positions.long() // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        bases = positions[starts[1:].long() - 1] + 1
        table = self._state.pages[lanes, : -(-int(bases.max()) // PAGE_SIZE)].contiguous()
        return Batch(tokens, positions, slots, starts, bases, table, starts[1:] - 1)
