"""The part of one sequence in steps that were launched on a device and have not landed yet.

    host's tokens   0 ........... len │
    on the device   0 ............... │ .. least .. │ .. most         the true length is between the two

While a step is in flight the host knows the sequence's length only within these bounds. It reserves pages and checks
limits with `most`, and decides with `least` whether the sequence reaches its last token in any case.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.kv.following import Follower


@dataclass(slots=True)
class InFlight:
    """Counts of one sequence, from the moment it gets its lane."""

    steps: int = 0  # steps in flight that the sequence takes part in
    rows: int = 0  # committed tokens that the chunks of these steps read
    least: int = 0  # fewest tokens that these steps add: one for each step that draws
    most: int = 0  # most tokens that these steps add: one for each step that draws, and all drafts
    left: bool = False  # the sequence ended while in flight: its lane and pages wait for the last step
    on_device: bool = False  # the device's lane has all of the host's tokens, and perhaps later ones
    pages: int = 0  # entries of the page table that the device has
    drafts: bool = False  # the device's drafter drafts for it in the latest launch
    held_for: str | None = None  # since the sequence was cut: the drafter for which hidden states are held
    heard: int = 0  # positions before this one whose hidden states the device's head has read
    follower: Follower | None = None  # positions that the device's drafter will have read when the next launch runs

    def launch(self, rows: int, draws: bool, max_draft: int, *, offered: bool) -> None:
        """Count a step that was launched. `offered`: the host drafts for it, not the device's drafter."""
        self.steps += 1
        self.rows += rows
        self.least += draws
        self.most += draws + max_draft
        self.drafts = max_draft > 0 and not offered

    def land(self, rows: int, draws: bool, max_draft: int) -> None:
        """Subtract a step that has landed from the counts."""
        self.steps -= 1
        self.rows -= rows
        self.least -= draws
        self.most -= draws + max_draft

    def void(self, *, draws: bool, max_draft: int) -> None:
        """Note that a step in flight adds nothing to the sequence."""
        self.least -= draws
        self.most -= draws + max_draft
        self.drafts = False

    def cut(self, length: int, *, held_for: str | None) -> None:
        """Note that the sequence has `length` tokens, and the device's lane has others behind them, which drafters may
        have read. Every step in flight is void. `held_for`: the drafter for which all of them held hidden states."""
        assert not self.most, "a sequence is cut before a step in flight that adds to it"
        self.on_device, self.held_for = False, held_for
        self.heard = min(self.heard, length - 1)
        if self.follower is not None:
            self.follower.known = min(self.follower.known, length - 1)

    def unread(self, length: int) -> range | None:
        """Return the positions that the drafter must read before the next launch can draft. The host knows `length`
        tokens of the sequence. None: unknown, because an earlier draft in flight, not of this drafter, may add more or
        fewer tokens."""
        if self.most > self.least:
            return range(0) if self.drafts else None
        assert self.follower is not None, "no drafter of the device reads this sequence"
        return self.follower.missing(length + self.least - 2)
