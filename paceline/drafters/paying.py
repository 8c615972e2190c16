"""Which nodes of a tree pay for their rows, by the confidence in each and the prices of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.drafters.base import Ask

SURE_GAIN = 0.1  # tokens that a draft of copies must gain: what the host takes for it in a batch, and errors of prices


def row_prices(ask: Ask) -> Sequence[float]:
    """Return the prices of the first, second … row of a draft; later ones have the last price."""
    return (*ask.row_prices, ask.row_price) if ask.row_prices else (ask.row_price,)


def gain_of(confidence: Sequence[float], prices: Sequence[float], *, share: float = 1.0) -> float:
    """Return the tokens that a draft is expected to add, less `share` of the prices of its rows."""
    rows = len(confidence)
    return sum(confidence) - share * (sum(prices[:rows]) + max(rows - len(prices), 0) * prices[-1])


def paying(
    confidence: Sequence[float], prices: Sequence[float], *, limit: int, floor: float, sure: bool = False
) -> tuple[list[int], float]:
    """Return the nodes to draft, the most likely first, and what they gain: as many as gain most, at most `limit`, and
    none below `floor`. `prices`: of the first, second … row; later ones have the last price. `sure`: none if they gain
    less than SURE_GAIN; else at least one.

    A parent is at least as likely as its children and comes before them, so it is among the nodes if they are."""
    order = sorted(range(len(confidence)), key=confidence.__getitem__, reverse=True)
    gain, most, count, last = 0.0, SURE_GAIN if sure else -math.inf, 0, len(prices) - 1
    for place, node in enumerate(order[:limit]):
        if confidence[node] < floor:
            break
        gain += confidence[node] - prices[place if place < last else last]
        if gain >= most:
            most, count = gain, place + 1
    return order[:count], most if count else 0.0
