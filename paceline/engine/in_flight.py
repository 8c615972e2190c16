"""A sequence's share in the steps that a device runs: launched, and not landed yet.

    host's tokens   0 ........... len │
    on the device   0 ............... │ .. least .. │ .. most         the true length is between the two

While something is in flight the host knows the sequence's length only within these bounds. Pages and limits go by
`most`, "does it end anyway" by `least`.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.kv.following import Follower


@dataclass(slots=True)
class InFlight:
    """Counts of one sequence, from the moment it gets its lane."""

    steps: int = 0  # steps in flight that it has a part in
    rows: int = 0  # committed tokens that they read
    least: int = 0  # tokens that they add at least: one for each step that draws
    most: int = 0  # tokens that they add at most: with all that is drafted
    left: bool = False  # the sequence ended while in flight: its lane and pages wait for the last step
    on_device: bool = False  # the device has the lane as the host knows it, or further on
    pages: int = 0  # entries of the page table that the device has
    drafts: bool = False  # the latest launch drafts for it
    follower: Follower | None = None  # what its drafter on the device will have read when the next launch begins

    def launch(self, *, rows: int, draws: bool, max_draft: int) -> None:
        """Count a step that was launched."""
        self.steps += 1
        self.rows += rows
        self.least += draws
        self.most += draws + max_draft
        self.drafts = max_draft > 0

    def land(self, *, rows: int, draws: bool, max_draft: int) -> None:
        """Take back what `launch` counted."""
        self.steps -= 1
        self.rows -= rows
        self.least -= draws
        self.most -= draws + max_draft

    def unread(self, length: int) -> range | None:
        """Positions that the drafter must read before the next launch can draft for a sequence of `length` tokens on
        the host. None: not known, because a draft that is in flight may bring more or less."""
        if self.most > self.least:
            return range(0) if self.drafts else None
        assert self.follower is not None, "no drafter of the device reads this sequence"
        return self.follower.missing(length + self.least - 2)
