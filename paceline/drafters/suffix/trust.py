"""Trust: how far the probabilities of a suffix automaton hold for one text.

They are counted in other text, or earlier in this one. A creative answer repeats less than an edit of code, so that
drafts are compared with what the target then said: right guesses by the sum of their probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass

# Chosen on recorded answers: docs/experiments.md, "Suffix automata: how likely a continuation is".
SURE = 0.97  # factor that even a text which was always right gets
PRIOR_GUESSES = 4.0  # guesses that the trust in all texts weighs as much as, for one text
TEXT_DECAY = 0.97  # weight of the past at each guess, for one text
ALL_DECAY = 0.998  # weight of the past at each guess, for all texts
FIRST_RIGHT, FIRST_EXPECTED = 18.0, 20.0  # guesses that trust in all texts begins with


@dataclass(slots=True)
class Trust:
    """Right and expected guesses, decayed."""

    decay: float = TEXT_DECAY
    right: float = 0.0
    expected: float = 0.0

    def learn(self, right: bool, expected: float) -> None:
        self.right = self.decay * self.right + right
        self.expected = self.decay * self.expected + expected

    def factor(self, others: Trust) -> float:
        """Return the factor for probabilities in this text; what is known of `others` counts until it has its own."""
        prior = min(1.0, others.right / others.expected)
        return SURE * min(1.0, (self.right + PRIOR_GUESSES * prior) / (self.expected + PRIOR_GUESSES))


def trust_in_all() -> Trust:
    return Trust(ALL_DECAY, FIRST_RIGHT, FIRST_EXPECTED)
