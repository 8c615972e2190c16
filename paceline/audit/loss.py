"""Changes that a lossy rule makes: how many answers, from which token on, and how likely the target finds the new text.

Replays of an audit with lossy rules ask for log-probabilities. They are the target's, before any sampling parameter, so
that answers of all temperatures can be compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.audit.replay import Replay


@dataclass(frozen=True, slots=True)
class Loss:
    """Changes that a rule made to the answers of one case. Log-probabilities are means over all tokens, in nats."""

    answers: int
    changed: int
    first_difference: float | None  # median index of the first other token, over changed answers
    plain_logprob: float
    logprob: float


def loss(plain: Sequence[Replay], other: Sequence[Replay]) -> Loss:
    """Compare answers of a lossy rule with the plain ones to the same requests."""
    pairs = list(zip(plain, other, strict=True))
    places = [_first_difference(a.tokens, b.tokens) for a, b in pairs if a.tokens != b.tokens]
    return Loss(
        answers=len(pairs),
        changed=len(places),
        first_difference=statistics.median(places) if places else None,
        plain_logprob=_mean_logprob(plain),
        logprob=_mean_logprob(other),
    )


def _first_difference(plain: Sequence[int], other: Sequence[int]) -> int:
    both = min(len(plain), len(other))
    return next((i for i in range(both) if plain[i] != other[i]), both)


def _mean_logprob(answers: Sequence[Replay]) -> float:
    tokens = sum(len(answer.tokens) for answer in answers)
    return sum(answer.logprob for answer in answers) / tokens if tokens else 0.0
