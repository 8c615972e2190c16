"""Latency targets: how late a request is, and what its tokens are worth then.

    lateness = time per output token since the first one / the request's target        above 1: late

A drafted token pays where it makes the whole batch faster: its price is the time of its row in tokens of all sequences.
One sequence of n pays with its own tokens only, so for its own speed a price of an n-th is right. Between the two lies
what a late request is granted: its prices are divided by its lateness, at most by `MAX_WORTH`, and never below what is
right for the late requests alone. A single one, or a quarter of the batch, also drafts where the batch must not.

Nothing is granted where that would make another request late that keeps to its target.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

from paceline.engine.sequence import Sequence

MAX_WORTH = 4.0  # factor by which a price is divided at most
# Share of a batch that may draft although the batch must not. Beyond, others lose more than the late ones win:
# docs/experiments.md, "Late requests in batches that must not draft (2026-11-20)".
MAX_SHARE = 0.25
MEASURED_TOKENS = 4  # output tokens after the first one from which their time says something
GRANTED_TOKENS = 8  # tokens of the longest draft of a late request while its batch must not draft


class Grants(NamedTuple):
    """Grants to late requests in one step."""

    worth: Mapping[int, float] = {}  # sequence → factor by which its prices are divided
    unguarded: Collection[int] = ()  # sequences that draft although their batch must not


NO_GRANTS = Grants()


def grants_of(sequences: Seq[Sequence], *, guarded: bool, slower: Callable[[int], float]) -> Grants:
    """Return what late requests of a batch are granted. `guarded`: the batch must not draft. `slower`: the share by
    which a step takes longer if so many sequences draft."""
    late = [each for each in sequences if each.lateness > 1.0]
    if not late or len(late) == len(sequences):
        return NO_GRANTS  # equally late ones are best served by the batch's own prices
    longer = 1.0 + slower(len(late))
    if any(each.lateness <= 1.0 < each.lateness * longer for each in sequences):
        return NO_GRANTS
    most = min(MAX_WORTH, len(sequences) / len(late))
    worth = {each.key: min(each.lateness, most) for each in late}
    few = len(late) == 1 or len(late) <= MAX_SHARE * len(sequences)
    return Grants(worth, worth.keys() if guarded and few else ())


def lateness(sequence: Sequence, *, target: float, now: float) -> float:
    """Return the measured time per output token of a sequence by its target; 0: too few tokens to tell."""
    first, output = sequence.counters.first_token, len(sequence.tokens) - sequence.prompt_length
    if first is None or output <= MEASURED_TOKENS:
        return 0.0
    return (now - first) / (output - 1) / target
