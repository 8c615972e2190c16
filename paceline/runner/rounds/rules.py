"""Drafts that another rule than the coupled one judges, inside a round on a device.

A round draws the target's tokens for all seats, as for the coupled rule. For the seats with another rule it gathers
their rows as `JudgedDrafts`, and a *judge* decides: it returns for each draft the last row that is accepted, and the
token after it. `accept` or `tree_accept` then commits these decisions. The judge comes from the engine, since rounds
know no rules. For Paceline's own rules it only launches work, so that such a round can be captured.

    rows of the verification   │ seat 0 │ seat 1     │ …          ragged
    rows of the drafts         │ root d d . .         │ …          [drafts, longest + 2], unused rows at the end

A rule that wants distributions or confidence gets the distributions of drafts whose tokens `DraftingRound.append` has
drawn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.tree_reference import TreeLanes, parents_of
from paceline.rules import Rule
from paceline.runner.rounds.alignment import places
from paceline.runner.rounds.protocol import Seat

MAX_IN_FLIGHT = 4  # steps with memory for what the host sends


@dataclass(frozen=True, slots=True)
class JudgedDrafts:
    """Drafts to be judged, on the device. One of no rule, or without drafted tokens, is not judged."""

    rules: tuple[Rule, ...]  # the rules of the round
    state: TreeLanes
    rule: Tensor  # int32 [drafts] index of each draft's rule; -1: none
    thresholds: Tensor  # float32 [drafts]
    lanes: Tensor  # int64 [drafts]
    drafted: Tensor  # int64 [drafts] number of drafted tokens
    tokens: Tensor  # int64 [drafts, width] the last committed token and the drafted ones
    parents: Tensor | None  # int64 [drafts, width] row that each row follows, 0 for the root; None: the one before it
    positions: Tensor  # int64 [drafts, width] position of the token after each row
    targets: Tensor  # int64 [drafts, width] the target's token after each row
    logits: Tensor  # float32 [drafts, width, vocab] edited logits after each row
    floors: Tensor  # float32 [drafts, width] smallest scaled logit that filters leave
    q: Tensor | None  # float32 [drafts, width, vocab] what the drafted tokens were drawn from; None: unknown


Judge = Callable[[JudgedDrafts], Tensor]
"""Judges drafts; returns int32 [drafts, 2]: the last accepted row, 0 for the root (-1: not judged), and the token after
it."""


class RoundRules:
    """The seats of a round with rules of their own, and the memory that judging them needs."""

    def __init__(
        self, rules: tuple[Rule, ...], count: int, *, seats: int, longest: int, vocab: int, state: TreeLanes
    ) -> None:
        """`count`: judged drafts, at most; `longest`: tokens of the longest one."""
        self._rules = rules
        self._state = state
        self._seats = seats
        self._width = longest + 2
        device = state.tokens.device
        self._places, total = places([count, count, count, seats])
        self._sent = torch.zeros(total, dtype=torch.int32, device=device)  # see `ask`
        pinned = device.type == "cuda"
        self._asks = deque(torch.zeros_like(self._sent, device="cpu", pin_memory=pinned) for _ in range(MAX_IN_FLIGHT))
        self._chosen, self._rule, self._thresholds, self.free = (self._sent[place] for place in self._places)
        self._chosen.fill_(seats)
        self._rule.fill_(-1)
        self._verdicts = torch.zeros((seats + 1, 2), dtype=torch.int32, device=device)  # the last one is for padding
        wants_probs = any(rule.wants_probs or rule.wants_confidence for rule in rules)
        self._q = _distributions(count, self._width, vocab, device) if wants_probs else None
        self._drawn = False  # the drafter has drawn tokens from distributions

    def ask(self, seats: Sequence[Seat]) -> None:
        """Send the `judged` seats of a step with rules and thresholds, and for all seats whether they draw freely."""
        self._asks.rotate()
        sent = self._asks[0].numpy()
        chosen, rule, thresholds, free = (sent[place] for place in self._places)
        chosen[:], rule[:], free[:] = self._seats, -1, 0
        for place, index in enumerate(judged(seats)):
            seat = seats[index]
            chosen[place], rule[place] = index, self._rules.index(seat.rule)
            thresholds[place : place + 1].view(np.float32)[:] = seat.threshold
            free[index] = seat.rule.wants_probs
        self._sent.copy_(self._asks[0], non_blocking=True)

    def begin(self) -> None:
        """Begin a round."""
        self._drawn = False
        if self._q is not None:
            self._q.zero_()

    def keep(self, logits: Tensor, floors: Tensor, turn: int) -> None:
        """Keep the distributions of edited logits [seats, vocab] that a drafter has drawn token `turn` from."""
        if self._q is not None:
            self._drawn = True
            seat = self._chosen.long().clamp(max=self._seats - 1)
            scale = self._state.inverse_temperature[self._lanes_of(seat), None]
            self._q[:, turn + 1, : logits.shape[1]] = probabilities(logits[seat], scale, floors[seat, None])

    def judge(
        self,
        judge: Judge,
        logits: Tensor,
        floors: Tensor,
        *,
        tokens: Tensor,
        positions: Tensor,
        targets: Tensor,
        row_starts: Tensor,
        tree: bool,
    ) -> Tensor:
        """Judge all drafts by edited logits [rows, vocab] of the verification; return verdicts int32 [seats, 2]."""
        seat = self._chosen.long().clamp(max=self._seats - 1)
        start = row_starts[seat].long()
        drafted = torch.where(self._chosen < self._seats, row_starts[seat + 1].long() - start - 1, 0)
        lanes = self._lanes_of(seat)
        row = (start[:, None] + torch.arange(self._width, device=start.device)).clamp(max=len(logits) - 1)
        drafts = JudgedDrafts(
            rules=self._rules,
            state=self._state,
            rule=self._rule,
            thresholds=self._thresholds.view(torch.float32),
            lanes=lanes,
            drafted=drafted,
            tokens=tokens[row].long(),
            parents=self._parents(lanes) if tree else None,
            positions=positions[row].long() + 1,
            targets=targets[row].long(),
            logits=logits[row],
            floors=floors[row],
            q=self._q if self._drawn else None,
        )
        self._verdicts.fill_(-1)
        self._verdicts[self._chosen.long()] = judge(drafts)
        return self._verdicts[: self._seats]

    def _parents(self, lanes: Tensor) -> Tensor:
        """Return the row that each row of the lanes' trees follows."""
        parents = parents_of(self._state, lanes, self._width - 2).long() + 1
        return torch.nn.functional.pad(parents, (1, 1))

    def attend(self, lanes: Tensor) -> None:
        """Set the lane of each seat, int32 [seats], in memory that keeps its address."""
        self._lanes = lanes

    def _lanes_of(self, seat: Tensor) -> Tensor:
        return self._lanes[seat].long()


def judged(seats: Sequence[Seat]) -> list[int]:
    """Return the indices of the seats whose drafts another rule than the coupled one judges. An offer has no
    distributions, so a rule that wants them leaves it to the coupled rule."""
    return [
        index
        for index, seat in enumerate(seats)
        if seat.rule is not Rule.COUPLED and seat.max_draft and not (seat.rule.wants_probs and seat.offer)
    ]


def probabilities(logits: Tensor, inverse_temperature: Tensor, floors: Tensor) -> Tensor:
    """Compute the distributions of edited logits [..., vocab], scaled and filtered; a temperature of 0 counts as 1."""
    scaled = logits * torch.where(inverse_temperature > 0, inverse_temperature, 1.0)
    return torch.softmax(scaled.masked_fill(scaled < floors, -torch.inf), dim=-1)


@cache  # never freed: captured graphs keep the address
def _distributions(count: int, width: int, vocab: int, device: torch.device) -> Tensor:
    return torch.zeros((count, width, vocab), device=device)
