"""What of a sequence is in the air: steps that were launched for it on a device and have not landed.

    host's tokens   0 ........... len │
    on the device   0 ............... │ .. sure .. │ .. most          somewhere between the two it is

While something is in the air the host knows its length only within these bounds. Pages and limits go by `most`, "does
it end anyway" by `sure`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Air:
    """One sequence's, from the moment it gets its lane."""

    flights: int = 0  # steps in the air that it has a part in
    rows: int = 0  # committed tokens that they read
    sure: int = 0  # tokens that they add at least: one for each that draws
    most: int = 0  # and at most: with all that is drafted
    left: bool = False  # the sequence ended while in the air: its lane and pages wait for the last flight
    aboard: bool = False  # the device has the lane as the host knows it, or further on
    pages: int = 0  # entries of the page table that the device has
    in_step: int = 0  # positions that the drafter on the device has read by the time the next launch begins
    filled: int = 0  # whole pages of them, entered in `engine.reading`
    drafts: bool = False  # the latest launch drafts for it

    def take_off(self, *, rows: int, draws: bool, max_draft: int) -> None:
        self.flights += 1
        self.rows += rows
        self.sure += draws
        self.most += draws + max_draft
        self.drafts = max_draft > 0

    def touch_down(self, *, rows: int, draws: bool, max_draft: int) -> None:
        self.flights -= 1
        self.rows -= rows
        self.sure -= draws
        self.most -= draws + max_draft
