"""Expected speed of decoding by batch, plain and with drafts, in tokens a second.

An acceptance is the probability that a drafted token is right when all before it are. A draft of k tokens then gives
1 + a + a^2 + … + a^k tokens a step. Nothing here knows an acceptance: it comes from the user, or from a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.plan.drafting import PaperDrafter
from paceline.plan.passes import Place, pass_seconds
from paceline.plan.size import ModelSize

SEARCH_STEPS = 20  # halvings of the interval in which the least acceptance that pays is sought


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a full batch in the mean."""

    sequences: int
    draft: float  # tokens drafted for each sequence; 0: plain
    seconds: float
    tokens: float  # for each sequence

    @property
    def tok_s(self) -> float:
        return self.sequences * self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Machine:
    """A target, the GPUs it is on, and its drafter."""

    target: ModelSize
    place: Place
    drafter: PaperDrafter | None = None

    def step(self, sequences: int, context: float, *, draft: float = 0, acceptance: float = 0.0) -> Step:
        """Compute a step with drafts of `draft` tokens; a mean need not be a whole number."""
        seconds = self.step_seconds(sequences, context, draft)
        return Step(sequences, draft, seconds, tokens_per_step(acceptance, int(draft)))

    def step_seconds(self, sequences: int, context: float, draft: float) -> float:
        rows = sequences * (1 + draft)
        verify = pass_seconds(self.target, self.place, rows=rows, sequences=sequences, context=context)
        if not draft or self.drafter is None:
            return verify
        drafting = self.drafter.seconds(self.place, length=draft, sequences=sequences, context=context)
        return verify + drafting + self.place.gpu.pace.round

    def best_step(self, sequences: int, context: float, *, longest: int, acceptance: float) -> Step:
        """Return the fastest step with drafts of at most `longest` tokens, as the governor would choose it: plain where
        no draft pays."""
        lengths = range(longest + 1 if self.drafter else 1)
        steps = [self.step(sequences, context, draft=length, acceptance=acceptance) for length in lengths]
        return max(steps, key=lambda step: step.tok_s)

    def least_acceptance(self, sequences: int, context: float, *, longest: int) -> float | None:
        """Return the acceptance from which some draft is faster than none; None: none is, at any."""
        low, high = 0.0, 1.0
        if not self.best_step(sequences, context, longest=longest, acceptance=high).draft:
            return None
        for _ in range(SEARCH_STEPS):
            middle = (low + high) / 2
            pays = self.best_step(sequences, context, longest=longest, acceptance=middle).draft > 0
            low, high = (low, middle) if pays else (middle, high)
        return high


def tokens_per_step(acceptance: float, draft: int) -> float:
    return float(sum(acceptance**place for place in range(draft + 1)))
