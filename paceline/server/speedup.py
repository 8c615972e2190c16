"""The speed-up by speculation, estimated from answers that ended."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from paceline.types import SequenceStats


@dataclass(frozen=True, slots=True)
class Estimate:
    """Speed over plain decoding, 1 for the same, with a 95 % interval."""

    speedup: float
    low: float
    high: float


class SpeedUp:
    """Estimates how much faster answers were written with speculation than they would have been without it.

    It is an estimate because no answer is decoded twice. Each complete answer counts from its second token on: tokens
    n, plain steps s, rounds r, seconds t of wall time. Over the latest answers, plain ones included, it fits
    t ≈ plain · s + round · r by least squares. An answer weighs 1 / (s + r), since its variance grows with its length.
    Without speculation an answer would have taken n steps; so over the answers that had rounds

        speed-up = Σ n · plain / Σ t = tokens a step / (seconds of a mean step / seconds of a plain step)

    The interval is the middle 95 % of that number over resamples of the answers, with replacement (bootstrap; always
    the same random numbers). It says how sure the fit is, not how well it fits: a step is taken to cost the same
    whatever else is in the batch. There is no estimate while there are too few answers, or too few plain steps to tell
    the two costs apart.
    """

    WINDOW = 256  # answers
    MIN_ANSWERS = 8
    RESAMPLES = 200

    def __init__(self) -> None:
        self._answers: deque[tuple[float, float, float, float]] = deque(maxlen=self.WINDOW)  # n, s, r, t
        self._known: tuple[Estimate | None] | None = None  # estimate of these answers; None: not made yet

    def observe(self, stats: SequenceStats) -> None:
        seconds = stats.time_total - stats.time_to_first
        plain = max(stats.steps - 1 - stats.rounds, 0)  # the first token came with the prompt
        if stats.output_tokens > 1 and seconds > 0 and plain + stats.rounds > 0:
            self._answers.append((stats.output_tokens - 1, plain, stats.rounds, seconds))
            self._known = None

    def estimate(self) -> Estimate | None:
        self._known = self._known or (self._fit(),)
        return self._known[0]

    def _fit(self) -> Estimate | None:
        answers = np.array(self._answers)  # [answers, 4]
        if len(answers) < self.MIN_ANSWERS or not answers[:, 2].any():
            return None
        found = _speedups(answers, _weights(len(answers), self.RESAMPLES))
        resampled = found[1:][np.isfinite(found[1:])]
        if not np.isfinite(found[0]) or len(resampled) < 0.95 * self.RESAMPLES:
            return None
        low, high = np.percentile(resampled, (2.5, 97.5))
        return Estimate(speedup=float(found[0]), low=float(low), high=float(high))


def _weights(answers: int, resamples: int) -> np.ndarray:
    """Count how often each answer is in each resample: [1 + resamples, answers]. The first row has each once."""
    drawn = np.random.default_rng(0).integers(answers, size=(resamples, answers))
    places = drawn + answers * np.arange(resamples)[:, None]
    counts = np.bincount(places.ravel(), minlength=resamples * answers).reshape(resamples, answers)
    return np.concatenate([np.ones((1, answers)), counts])


def _speedups(answers: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Fit each row of `weights`: [1 + resamples]. NaN where plain steps and rounds cannot be told apart."""
    n, s, r, t = answers.T
    ss, sr, rr, st, rt = (weights @ (x * y / (s + r)) for x, y in ((s, s), (s, r), (r, r), (s, t), (r, t)))
    tokens, seconds = weights @ (n * (r > 0)), weights @ (t * (r > 0))
    with np.errstate(divide="ignore", invalid="ignore"):
        determinant = ss * rr - sr * sr
        plain = (rr * st - sr * rt) / determinant
        speedups: np.ndarray = tokens * plain / seconds
    return np.where((determinant > 1e-3 * ss * rr) & (plain > 0) & (seconds > 0), speedups, np.nan)
