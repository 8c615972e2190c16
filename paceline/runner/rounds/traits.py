"""Traits of drafters inside rounds: questions about a `DeviceDrafter`, answered from its optional attributes.

Rounds and the engine ask here alone, so that what a missing attribute means is said once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from paceline.runner.heads.protocol import ReadingHead
from paceline.runner.rounds.protocol import DeviceDrafter, Seat

SPARE_STATES = 32  # positions that a sequence may decode without a draft before its head must read their states
LONGEST_COPY = 16  # tokens of a portfolio's longest copy


def taps_of(drafter: DeviceDrafter) -> Sequence[int]:
    """Return the places of the target whose hidden states a drafter reads."""
    taps: Sequence[int] = getattr(drafter, "taps", ())
    return taps


def reads_prediction(drafter: DeviceDrafter) -> bool:
    """Tell whether a drafter needs the requests' predictions on the device."""
    reads: bool = getattr(drafter, "reads_prediction", False)
    return reads


def head_of(drafter: DeviceDrafter) -> ReadingHead | None:
    """Return the head of a drafter that has one."""
    head: ReadingHead | None = getattr(drafter, "head", None)
    return head


def drafter_of(drafter: DeviceDrafter | None, seats: int, most: int) -> DeviceDrafter | None:
    """Return the drafter of rounds with `seats` seats and drafts of at most `most` tokens: `drafter` itself, unless it
    has several."""
    sized: Callable[[int, int], DeviceDrafter] | None = getattr(drafter, "sized", None)
    return drafter if sized is None else sized(seats, most)


def longest_draft(drafter: DeviceDrafter, most: int) -> int:
    """Return the tokens of a drafter's longest draft in rounds whose drafts have at most `most`."""
    return min(most, getattr(drafter, "max_draft", most))


def passed_length(drafter: DeviceDrafter | None, length: int, most: int) -> int:
    """Return the tokens for which a round with drafts of at most `most` drafts, if its longest draft may have `length`.

    Trees are drafted whole: few of their tokens take as many passes, and need the same kernels and graphs."""
    if not length or drafter is None:
        return length
    longest = longest_draft(drafter, most)
    return longest if drafts_trees(drafter) else min(length, longest)


def levels_of(drafter: DeviceDrafter | None, length: int, most: int) -> int:
    """Return the levels of a draft of `length` tokens in such a round."""
    if drafter is None or not hasattr(drafter, "levels"):
        return length
    return min(length, int(drafter.levels(passed_length(drafter, length, most))))


def longest_copy(drafter: DeviceDrafter | None) -> int:
    """Return the tokens of the longest copy that a drafter makes beside its network; 0: it makes none."""
    return int(getattr(drafter, "max_copy", 0))


def copies_alone(drafter: DeviceDrafter | None) -> bool:
    """Tell whether a drafter may copy more tokens than its network drafts: a model with KV memory of its own would not
    have read them, while hidden states wait for their head."""
    return longest_copy(drafter) > 0 and drafter is not None and drafter.reader is None


def network_of(name: str, drafters: Mapping[str, DeviceDrafter]) -> str:
    """Return the name of the drafter whose KV memory and hidden states a drafter uses: its own, or that of its network
    if rounds have it as well."""
    network = str(getattr(drafters[name], "network", name))
    return network if network in drafters else name


def added_by(drafter: DeviceDrafter, most: int) -> int:
    """Return how many positions a round with a drafter's draft adds to a sequence, at most."""
    levels = levels_of(drafter, longest_draft(drafter, most), most)
    return 1 + max(levels, min(longest_copy(drafter), most))


def held_by(drafter: DeviceDrafter, most: int) -> int:
    """Return for how many positions of a sequence rounds hold hidden states that a drafter has not read."""
    return added_by(drafter, most) + SPARE_STATES


def held_for(name: str, drafters: Mapping[str, DeviceDrafter], most: int) -> int:
    """Return for how many positions of a sequence rounds hold hidden states that a drafter shares with others."""
    network = network_of(name, drafters)
    return max(held_by(by, most) for each, by in drafters.items() if network_of(each, drafters) == network)


def held_beside_copies(drafter: DeviceDrafter, most: int) -> int:
    """Return for how many positions a lane needs memory for hidden states, if a portfolio may share them."""
    return max(held_by(drafter, most), 1 + LONGEST_COPY + SPARE_STATES)


def threshold_of(drafter: DeviceDrafter, seat: Seat) -> float:
    """Return the confidence below which the draft of a seat ends; 0: never."""
    return float(drafter.threshold(seat)) if hasattr(drafter, "threshold") else 0.0


def drafts_trees(drafter: DeviceDrafter | None) -> bool:
    return getattr(drafter, "tree", False)
