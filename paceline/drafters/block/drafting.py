"""Drafting with a block drafter, once it has read everything before the last committed token: one pass for all drafts.

    context    0 ............ L-2 │          read from the target's hidden states
    block                         │ L-1 L …   the last committed token, then masks; one drafted token a row

The tokens of a block are drawn from left to right, because a head of it may ask for the token before. A further token
costs its row of the verification alone, so a draft ends where the confidence in it does not pay for that row.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.draft import Draft
from paceline.drafters.base import Ask
from paceline.drafters.draft_in_progress import DraftInProgress, head_confidence
from paceline.drafters.eagle.drafting import Draws
from paceline.drafters.tree_drafting import Thresholds
from paceline.kernels.base import PAGE_SIZE
from paceline.runner.heads.protocol import Anchor, BlockForward, BlockRows
from paceline.runner.lanes import Lanes


class BlockDrafting:
    def __init__(self, head: BlockForward, *, lanes: Lanes, draws: Draws, thresholds: Thresholds) -> None:
        self._head = head
        self._lanes = lanes
        self._draws = draws
        self._thresholds = thresholds

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        blocks = self._head.blocks([self._anchor(ask) for ask in asks])
        return [self._walk(ask, rows) for ask, rows in zip(asks, blocks, strict=True)]

    def _anchor(self, ask: Ask) -> Anchor:
        last = len(ask.tokens) - 1
        pages = self._lanes.pages_of(ask.lane, 0, -(-last // PAGE_SIZE))
        return Anchor(int(ask.tokens[last]), last, pages, ask.max_draft)

    def _walk(self, ask: Ask, rows: BlockRows) -> Draft:
        """Draw the tokens of a block, as far as they pay.

        A token that was drawn for a rule with distributions stays, whatever it is: if it were chosen by its value, its
        distribution would be another one. What the drafter says of its row was known before."""
        draft, before, sure = DraftInProgress(ask, min_confidence=0.0), int(ask.tokens[-1]), list[float]()
        for row in range(ask.max_draft):
            least, reached = self._thresholds.of_row(ask, row), sure[-1] if sure else 1.0
            own = rows.confidence(row, before)
            if own is not None and reached * own < least:
                break
            logits = rows.logits(row, before)
            place, edited = self._draws.draw_token(draft, logits, rows.best(row))
            if own is None:
                own = head_confidence(self._head.probability(edited, place), drawn=not ask.sampler.greedy)
            sure.append(reached * min(own, 1.0))
            before = draft.tokens[-1]
            if sure[-1] < least:
                break
        return _finished(draft, sure, least=[self._thresholds.of_row(ask, row) for row in range(len(sure))])


def _finished(draft: DraftInProgress, sure: list[float], *, least: list[float]) -> Draft:
    """Return the draft, without a last token that does not pay."""
    made = draft.finished()
    kept = len(sure)
    if kept and sure[-1] < least[-1] and not draft.free:
        kept -= 1
    confidence = made.confidence or tuple(sure)
    return Draft(made.tokens[:kept], probs=made.probs, passes=1, confidence=confidence[:kept])
