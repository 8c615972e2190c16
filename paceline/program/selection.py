"""How `select` scores options, whoever computes the log-probabilities.

The text before the options and each whole text are tokenised. What all of them have in common at the beginning is the
prefix; an option's score is over the tokens behind it. Usually that are the tokens of the option alone. Where an option
would merge with the last token of the text before it, that token counts for every option, so that scores compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from paceline.errors import InvalidRequest
from paceline.program.expressions import Select


def prefix_length(before: Sequence[int], texts: Sequence[Sequence[int]]) -> int:
    """Return how many tokens are common to the text before the options and to each text with an option behind it."""
    columns = zip(before, *texts, strict=False)
    length = sum(1 for _ in takewhile(lambda column: len({*column}) == 1, columns))
    if not length:
        raise InvalidRequest("select needs text before it: the first token of a text has no log-probability")
    return length


def option_scores(ask: Select, logprobs: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the score of each option, from the log-probabilities of its tokens."""
    totals = [sum(each) if ask.by == "total" else sum(each) / len(each) for each in logprobs]
    return dict(zip(ask.options, totals, strict=True))
