"""Hidden states that rounds hold for a head, in plain torch: the oracle of kernels/cuda/states.py, also run on CPUs.

A head's row of position p needs the target's hidden state of p and the *next* token. So the states of committed
positions are held until the head reads them, at the beginning of its next draft:

    committed   0 ............................. L-2  L-1 │      the target reads the last token while it verifies
    the head    0 ............. │ held ........ L-2      │      `counts` of them, which end at `ends` = L - 1

    hold      keep the states of the positions that a step has committed
    take      lay out the held rows of all seats for the head's first pass
    last      copy the last held state of each seat

Held states of a lane are a ring: that of position p is at place p % capacity. If it is full, the oldest are lost. A
step that holds nothing leaves `ends` behind: the held states are then useless, and the seat does not draft in the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.kernels.base import PAGE_SIZE
from paceline.kernels.round_reference import DeviceLanes


@dataclass(frozen=True, slots=True)
class HeldStates:
    """The hidden states that one drafter has yet to read, by lane."""

    states: Tensor  # [lanes + 1, capacity, width]
    ends: Tensor  # int32 [lanes + 1]: the position after the last held one
    counts: Tensor  # int32 [lanes + 1]: held positions that were not read
    _buffers: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    @classmethod
    def empty(cls, table: Tensor, *, capacity: int, width: int, dtype: torch.dtype) -> HeldStates:
        """Hold nothing yet. `table` int32 [2, lanes + 1] becomes `ends` and `counts`."""
        ends, counts = table
        return cls(torch.zeros((len(ends), capacity, width), dtype=dtype, device=table.device), ends, counts)

    def buffer(self, name: str, rows: int) -> Tensor:
        """Return scratch memory [rows, width] with one address for all row counts up to the same power of two."""
        size = 1 << max(rows - 1, 0).bit_length()
        if (name, size) not in self._buffers:
            self._buffers[name, size] = self.states.new_zeros((size, self.width))
        return self._buffers[name, size][:rows]

    @property
    def capacity(self) -> int:
        return self.states.shape[1]

    @property
    def width(self) -> int:
        return self.states.shape[2]


@dataclass(frozen=True, slots=True)
class Taken:
    """The rows of a head's first pass, and what later passes need: one row for each seat and turn."""

    tokens: Tensor  # int32 [rows]: the token after each row's position
    positions: Tensor  # int32 [rows]
    slots: Tensor  # int32 [rows]
    row_starts: Tensor  # int32 [seats + 1]
    features: Tensor  # [rows, width]
    confidence: Tensor  # float32 [seats]: 1, or -1 if nothing is held
    found: Tensor  # int32 [seats]: 0
    later_positions: Tensor  # int32 [turns, seats]: of turns 1, 2, …
    later_slots: Tensor  # int32 [turns, seats]

    @classmethod
    def empty(cls, *, seats: int, rows: int, turns: int, features: Tensor, device: torch.device | str) -> Taken:
        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            tokens=ints(rows),
            positions=ints(rows),
            slots=ints(rows),
            row_starts=ints(seats + 1),
            features=features,
            confidence=torch.zeros(seats, device=device),
            found=ints(seats),
            later_positions=ints(turns, seats),
            later_slots=ints(turns, seats),
        )


def hold(
    held: HeldStates,
    state: DeviceLanes,
    *,
    seats: Tensor,
    starts: Tensor,
    outcomes: Tensor,
    features: Tensor,
    read: Tensor | None = None,
    tree: bool = False,
    pdl: bool = False,
) -> None:
    """Hold the states of the positions that `accept` has just committed: rows `starts[b]`, … of `features`.

    `outcomes` is what `accept` wrote: a seat has 1 + accepted new rows. Seats with `read` int32 [seats] above 0 drafted
    in this step, so that all states held before were read. With `tree`, `tree_accept` wrote the outcomes, and the rows
    after the first are those of its path. Seats of the dummy lane hold nothing."""
    path = outcomes[:, 4 + 2 * (outcomes.shape[1] // 4 - 1) :] if tree else None
    for b, lane in enumerate(seats.tolist()):
        if lane == state.dummy:
            continue
        count, end = 1 + int(outcomes[b, 0]), int(state.lengths[lane]) - 1
        for i in range(max(0, count - held.capacity), count):
            row = int(starts[b]) + (i if path is None or i == 0 else 1 + int(path[b, i - 1]))
            held.states[lane, (end - count + i) % held.capacity] = features[row].to(held.states.dtype)
        follows = int(held.ends[lane]) == end - count and not (read is not None and int(read[b]) > 0)
        held.counts[lane] = min(count + (int(held.counts[lane]) if follows else 0), held.capacity)
        held.ends[lane] = end


def take(
    held: HeldStates, state: DeviceLanes, *, seats: Tensor, limits: Tensor, most: int, into: Taken, pdl: bool = False
) -> None:
    """Lay out the last `most` held rows of all seats with a limit above 0.

    If there are too few rows, seats lose their oldest ones, later seats first; each keeps one. Padding is token 0 at
    position 0 of the dummy lane, on the scratch page."""
    lane, rows = seats.long(), len(into.tokens)
    length = state.lengths[lane].long()
    there = (held.ends[lane] == length - 1) & (limits > 0) & (held.counts[lane] > 0) & (lane != state.dummy)
    wanted = torch.where(there, held.counts[lane], 0).long().clamp(max=most)
    extra = (wanted - 1).clamp(min=0)
    before = extra.cumsum(0) - extra
    count = torch.minimum(wanted, 1 + torch.minimum(extra, (rows - len(seats) - before).clamp(min=0)))
    into.confidence.copy_(torch.where(there, 1.0, -1.0))
    into.found.zero_()
    into.row_starts[0].zero_()
    into.row_starts[1:].copy_(count.cumsum(0))
    row = torch.arange(rows, device=seats.device)
    seat = torch.searchsorted(into.row_starts[1:].long(), row, right=True)
    used = seat < len(seats)
    seat = seat.clamp(max=len(seats) - 1)
    owner = torch.where(used, lane[seat], state.dummy)
    at = length[seat] - 1 - count[seat] + row - into.row_starts[seat]
    at = torch.where(used, at, 0)
    into.tokens.copy_(torch.where(used, state.tokens[owner, at + 1], 0))
    into.positions.copy_(at)
    into.slots.copy_(state.pages[owner, at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE)
    into.features.copy_(torch.where(used[:, None], held.states[owner, at % held.capacity], 0))
    turn = torch.arange(len(into.later_positions), device=seats.device)[:, None]
    later = (length - 1 + turn).clamp(max=state.tokens.shape[1] - 1)
    into.later_positions.copy_(later)
    into.later_slots.copy_(state.pages[lane, later // PAGE_SIZE] * PAGE_SIZE + later % PAGE_SIZE)


def last(held: HeldStates, state: DeviceLanes, *, seats: Tensor) -> tuple[Tensor, Tensor]:
    """Return the last held state of each seat, [seats, width], and whether there is one, bool [seats]."""
    lane = seats.long()
    end = state.lengths[lane].long() - 1
    there = (held.ends[lane] == end) & (held.counts[lane] > 0) & (lane != state.dummy)
    return held.states[lane, (end - 1).clamp(min=0) % held.capacity], there
