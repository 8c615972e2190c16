"""An EAGLE-3 head that drafts inside rounds on a device: one pass a token, no host in between.

The first pass reads the hidden states that rounds hold, further ones the head's own output. All seats of a round run
every pass; a draft that has become doubtful gets no more tokens, so that verification does not pay for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.drafters.eagle.drafting import DOUBTFUL_CONFIDENCE
from paceline.errors import InvalidRequest
from paceline.runner.heads.protocol import HeadForward
from paceline.runner.rounds.protocol import DraftingRound, Seat

MAX_DRAFT = 5  # tokens of a chain


class EagleOnDevice:
    """Implements DeviceDrafter."""

    finds_fewer = True
    ends_drafts = True
    reader = None

    def __init__(
        self,
        head: HeadForward,
        *,
        taps: Sequence[int],
        max_draft: int = MAX_DRAFT,
        min_confidence: float | None = None,
    ) -> None:
        """Drafts end below `min_confidence`; None: if one more token does not pay. A request's `p_min` replaces
        either."""
        if max_draft < 1 or not (min_confidence is None or 0 <= min_confidence <= 1):
            raise InvalidRequest(f"max_draft {max_draft} must be at least 1, min_confidence {min_confidence} in [0, 1]")
        self.head = head
        self.taps = taps
        self.max_draft = max_draft
        self._min_confidence = min_confidence

    def threshold(self, seat: Seat) -> float:
        given = self._min_confidence if seat.p_min is None else seat.p_min
        return seat.price / DOUBTFUL_CONFIDENCE if given is None else given

    def draft(self, round: DraftingRound) -> None:
        for turn in range(round.longest):
            round.append(round.guess(self.head, turn), turn, ids=self.head.ids, doubting=True)
