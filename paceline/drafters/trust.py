"""Trust: how far a drafter's confidence holds for one text.

It was counted or fitted in other text, or earlier in this one. A creative answer repeats less than an edit of code, so
that drafts are compared with what the target then said: right guesses by the sum of their probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def judged(
    tokens: Sequence[int], parents: Sequence[int], confidence: Sequence[float], trust: float, said: Sequence[int]
) -> list[tuple[bool, float]]:
    """Compare a draft with the tokens that the target said: at each level that it reached, whether a guess was right,
    and the probability of that before `trust`. `confidence`: of the path to each token, after it."""
    children: dict[int, list[int]] = {}
    for i, parent in enumerate(parents):
        children.setdefault(parent, []).append(i)
    found, node, reached = [], -1, trust
    for token in said:
        level = children.get(node)
        if level is None:
            break
        expected, node = 0.0, -2
        for i in level:
            expected += confidence[i]
            if tokens[i] == token:
                node = i
        found.append((node >= 0, expected / reached))
        if node < 0:
            break
        reached = confidence[node] * trust
    return found
