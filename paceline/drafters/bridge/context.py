"""The text of one sequence in a drafter's own tokens, which grows as the target commits tokens.

    target    … Ġthe │ Ġspec                  then   … Ġthe │ Ġspec ulative
    drafter   … Ġthe │ Ġspec                         … Ġthe │ Ġspeculative
                     ^ settled                              ^ the last word is translated again

The last word may still grow, so only the tokens before it are settled: no later token of the target changes them.
"""

from __future__ import annotations

import numpy as np

from paceline.text.bridge import VocabularyBridge


class DrafterContext:
    """A sequence in the drafter's tokens."""

    def __init__(self, bridge: VocabularyBridge) -> None:
        self.tokens = list(bridge.drafter.prefix)
        self.settled = len(self.tokens)  # leading tokens that stay as they are
        self._way = bridge.to_drafter
        self._target_prefix = bridge.target.prefix
        self._seen = 0  # tokens of the target that were taken
        self._word: list[int] = []  # its last tokens, which may become a longer word

    def follow(self, text: np.ndarray) -> None:
        """Take the target's tokens int32 [committed]: those of the last time, and new ones behind them."""
        del self.tokens[self.settled :]
        for token in text[self._seen or self._frame(text) :].tolist():
            if self._way.ends(self._word, token):
                self.tokens += self._way.word(tuple(self._word))
                self._word = []
            self._word.append(token)
        self._seen = len(text)
        self.settled = len(self.tokens)
        self.tokens += self._way.word(tuple(self._word))

    def _frame(self, text: np.ndarray) -> int:
        """Count the tokens that the target expects before any text: the drafter has its own."""
        frame = self._target_prefix
        return len(frame) if tuple(text[: len(frame)].tolist()) == frame else 0
