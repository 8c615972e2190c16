"""A draft that grows token by token, for drafters that compute distributions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from paceline.draft import Draft
from paceline.drafters.base import Ask
from paceline.kernels.round_reference import BEST, DRAWN
from paceline.sampling.sampler import Pick, Stream


@dataclass(slots=True)
class DraftInProgress:
    """The tokens drafted so far for one ask, and the drafter's confidence in them."""

    ask: Ask
    min_confidence: float  # the draft ends below this
    tokens: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)  # [vocab] each, for rules that ask for distributions
    confidence: float = 1.0  # the drafter's own estimate that all tokens so far are right
    told: list[float] = field(default_factory=list)  # its estimates up to each token, for a rule that asks for them
    own: list[int] = field(default_factory=list)  # the draft in the model's vocabulary, where that is another one
    stuck: bool = False  # no token can follow

    @property
    def complete(self) -> bool:
        return len(self.tokens) == self.ask.max_draft

    @property
    def over(self) -> bool:
        return self.complete or self.stuck or self.confidence < self.min_confidence

    @property
    def position(self) -> int:
        """Position of the token that is drawn next."""
        return len(self.ask.tokens) + len(self.tokens)

    @property
    def free(self) -> bool:
        """True if tokens are drawn with the drafter's own noise, because the rule needs distributions."""
        return self.ask.rule.wants_probs and not self.ask.sampler.greedy

    def draw_freely(self, logits: Tensor, pick: Pick) -> int:
        """Draw a token from logits [1, vocab] in the target's vocabulary; keep the distribution for the rule."""
        sampler = self.ask.sampler
        edited = sampler.edit(logits, [self.tokens])
        self.probs.append(sampler.probs(edited)[0])
        # Noise of this round alone: tokens drawn beyond a rejection may influence the length of the next draft, which
        # must not draw with the same noise.
        place = np.array([(len(self.ask.tokens) << 32) + self.position])
        return int(sampler.draw(edited, place, pick, stream=Stream.DRAFT)[0])

    def tell(self, place: int, logits: Tensor) -> None:
        """Keep how likely the token at `place` of edited logits [1, vocab] is, for a rule that wants confidence."""
        sampler = self.ask.sampler
        probs = torch.softmax(logits, dim=-1) if sampler.greedy else sampler.probs(logits)
        self.told.append((self.told[-1] if self.told else 1.0) * float(probs[0, place]))

    def finished(self) -> Draft:
        probs = torch.stack(self.probs) if self.probs else None
        return Draft(tokens=tuple(self.tokens), probs=probs, confidence=tuple(self.told))


def probability_of(token: int, logits: Tensor) -> float:
    """Return the probability of a token by logits [vocab]."""
    return float(torch.exp(logits[token] - torch.logsumexp(logits, dim=0)))


def head_confidence(probability: float, *, drawn: bool) -> float:
    """Estimate how often a token that a head gives this probability is the target's own.

    The best token is right more often than its probability says, because the target takes its best token, too. If both
    draw with the same noise, even an unlikely token is right as often as the two distributions overlap.
    Fitted to SmolLM2's head on 15,000 rows of MT-bench: docs/experiments.md, "How sure a head is of its tokens". The
    trees of a compiled head also know the token's rank: kernels/cpu/candidates.c."""
    if drawn:
        return DRAWN[0] + DRAWN[1] * math.sqrt(probability)
    return BEST[0] * probability / (1 + BEST[1] * probability)
