"""A draft in the making, token by token, as drafters that compute distributions draw it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from paceline.draft import Draft
from paceline.drafters.base import Ask
from paceline.sampling import Pick, Stream


@dataclass(slots=True)
class Drawing:
    ask: Ask
    floor: float  # of the confidence, below which it ends
    tokens: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)
    confidence: float = 1.0  # the drafter's own, that all tokens so far are right

    @property
    def complete(self) -> bool:
        return len(self.tokens) == self.ask.max_draft

    @property
    def over(self) -> bool:
        return self.complete or self.confidence < self.floor

    @property
    def position(self) -> int:
        """Of the token to be drawn next."""
        return len(self.ask.tokens) + len(self.tokens)

    @property
    def free(self) -> bool:
        """True: drawn with noise of the drafter's own, because the rule asks for distributions."""
        return self.ask.rule.wants_probs and not self.ask.sampler.greedy

    def draw_freely(self, logits: Tensor, pick: Pick) -> int:
        """From logits [1, vocab] of the target's vocabulary; the distribution is kept for the rule."""
        sampler = self.ask.sampler
        edited = sampler.edit(logits, [self.tokens])
        self.probs.append(sampler.probs(edited)[0])
        # Noise of this round alone: tokens drawn beyond a rejection may have decided how long the next draft gets, and
        # must not be drawn again in it.
        place = np.array([(len(self.ask.tokens) << 32) + self.position])
        return int(sampler.draw(edited, place, pick, stream=Stream.DRAFT)[0])

    def finished(self) -> Draft:
        return Draft(tokens=tuple(self.tokens), probs=torch.stack(self.probs) if self.probs else None)


def belief(logits: Tensor, token: int) -> float:
    """The probability of a token by logits [vocab]."""
    return float(torch.exp(logits[token] - torch.logsumexp(logits, dim=0)))


def chain_acceptance(probability: float, *, drawn: bool) -> float:
    """Probability that the target accepts a head's token, in a chain that the host draws token by token.

    Fitted to 15,000 rows of MT-bench (docs/experiments.md, "How sure a head is of its tokens"). Greedy, the best token
    is right more often than its probability says, because the target takes its best one, too. With shared noise
    (`drawn`), even an unlikely token is right as often as the two distributions overlap there. The trees of a compiled
    head also know the token's rank and its distance from the best: `tree_acceptance` in kernels/cpu/candidates.c."""
    return 0.22 + 0.65 * math.sqrt(probability) if drawn else 2.5 * probability / (1 + 1.5 * probability)
