"""Caution: whether the next round of a sequence with a grammar draws with masks, or is checked when it has landed.

A token is the argmax of edited logits and noise. If the argmax over all tokens is one that the grammar allows, it is
also the argmax over the allowed ones. So a round may fly without masks, as one without a grammar does. When its tokens
land, the grammar reads them. The text is cut before the first that it does not allow, and the next rounds draw with
masks:

    round n       without masks   a b x ·      x is not allowed: a b is kept
    round n + 1   in flight       void         the device went on behind x
    round n + 2   with masks      c d …        written again at the cut

Filters keep the most likely of the *allowed* tokens, and lossy rules judge drafts by distributions. Both depend on
tokens that the mask leaves out, so such sequences draw with masks in every round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.accept.registry import in_use
from paceline.types import Rule

# In sixteen JSON answers of SmolLM2 (greedy, 320 tokens), masks change 19 % of the first 60 tokens and 1.3 % of those
# behind them. For how these were chosen see docs/experiments.md, "Rounds without masks".
FIRST_ROUNDS = 12  # rounds with masks at the beginning of an answer
MAX_ROUNDS = 16  # rounds with masks after a cut, at most


@dataclass(slots=True)
class Caution:
    """The next rounds of one sequence, from the moment it gets its lane."""

    rounds: float  # next rounds that draw with masks; infinite: all
    after_cut: int = 1  # rounds with masks after the next cut

    def launch(self) -> bool:
        """Count a round that is launched. Returns whether it draws with masks."""
        if not self.rounds:
            return False
        self.rounds -= 1
        return True

    def repeat(self) -> None:
        """Count a round with masks that drew nothing: the next one has masks, too."""
        self.rounds += 1

    def passed(self) -> None:
        """Count a round without masks whose tokens are all allowed: the next cut counts as the first."""
        self.after_cut = 1

    def cut(self) -> None:
        """Count a round that was cut. Each that follows another one doubles the rounds with masks."""
        self.rounds, self.after_cut = self.after_cut, min(2 * self.after_cut, MAX_ROUNDS)


def caution_for(*, filters: bool, rule: Rule) -> Caution:
    """Return the caution of a sequence whose tokens are filtered or not, and drafts judged by `rule`."""
    return Caution(math.inf if filters or not in_use(rule).lossless else FIRST_ROUNDS)
