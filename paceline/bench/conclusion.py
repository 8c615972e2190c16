"""The conclusion of a measurement in one sentence, from ratios and their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Outcome:
    """A speed divided by that of plain decoding, or of another arm."""

    name: str  # of the case, where there are several
    ratio: float | None
    interval: Sequence[float] | None  # low and high
    same: int | None = None  # answers with the same text
    answers: int | None = None
    void: bool = False  # the text is degenerate: its speed is no claim

    @property
    def verdict(self) -> str:
        if self.ratio is None or self.interval is None:
            return "unknown"
        low, high = self.interval
        return "faster" if low > 1 else "slower" if high < 1 else "same"


def conclusion(lead: str, outcomes: Sequence[Outcome], *, interrupted: bool = False) -> str:
    """Conclude from all cases of a measurement. `lead`: the sentence up to its number, as "Speculation makes M"."""
    measured = [each for each in outcomes if each.ratio is not None]
    if not measured:
        said = "Nothing was measured that could be compared"
    elif any(each.void for each in measured):
        said = "No speed can be claimed: too many answers loop or repeat themselves, which is easy to guess"
    else:
        said = _of_one(lead, measured[0]) if len(measured) == 1 else _of_many(lead, measured)
    return f"{'Interrupted; so far: ' if interrupted else ''}{said}{_same_text(measured)}."


def _of_one(lead: str, outcome: Outcome) -> str:
    factor = f"{outcome.ratio:.2f} times as fast{_interval(outcome)}"
    return {
        "faster": f"{lead} {factor}",
        "slower": f"{lead} slower: {factor}",
        "same": f"No difference can be shown: {_lowered(lead)} {factor}",
        "unknown": f"Too few measurements for a conclusion: {_lowered(lead)} {factor}, without an interval",
    }[outcome.verdict]


def _of_many(lead: str, outcomes: Sequence[Outcome]) -> str:
    by_verdict = {verdict: [each for each in outcomes if each.verdict == verdict] for verdict in VERDICTS}
    parts = [
        f"{VERDICTS[verdict]} in {len(found)} of {len(outcomes)} cases{_range(found)}"
        for verdict, found in by_verdict.items()
        if found
    ]
    return f"{lead} {'; '.join(parts)}"


VERDICTS = {
    "faster": "faster",
    "slower": "slower",
    "same": "neither faster nor slower, as far as can be shown,",
    "unknown": "of unknown speed, by too few measurements,",
}


def _range(outcomes: Sequence[Outcome]) -> str:
    ratios = [each.ratio for each in outcomes if each.ratio is not None]
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return f" ({low} times as fast)" if low == high else f" ({low} to {high} times as fast)"


def _interval(outcome: Outcome) -> str:
    return "" if outcome.interval is None else f" ({outcome.interval[0]:.2f} to {outcome.interval[1]:.2f})"


def _same_text(outcomes: Sequence[Outcome]) -> str:
    counted = [(each.same, each.answers) for each in outcomes if each.same is not None and each.answers]
    if not counted:
        return ""
    return f", same text in {sum(same for same, _ in counted)} of {sum(answers for _, answers in counted)}"


def _lowered(lead: str) -> str:
    return lead[:1].lower() + lead[1:]


def of_ratio(name: str, found: dict[str, Any], **more: Any) -> Outcome:
    """Read the record of a ratio (`Ratio.record`)."""
    return Outcome(name, found["ratio"], found["interval"], **more)
