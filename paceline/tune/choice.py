"""The choice: of the ways to decode that were measured, the one to serve with, and the file that `serve` reads.

A limit of latency (`Slo`) comes before speed. Among the rest the default settings win unless a fixed drafter is clearly
faster, because they go on measuring while they serve. Whatever is chosen drafts only up to the batch size at which it
was faster than plain decoding; beyond it the server decodes plainly.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import InvalidRequest
from paceline.tune.ways import DEFAULT, PLAIN

MARGIN = 0.98  # of the best speed: the default settings are chosen from here on
UNITS = {"ms": 1e-3, "s": 1.0}  # seconds


@dataclass(frozen=True, slots=True)
class Slo:
    """The longest time that users may wait, in the median: for the first token, or for each further one."""

    name: str  # ttft or tpot
    seconds: float

    def __str__(self) -> str:
        return f"{self.name}={self.seconds * 1e3:g}ms"

    @classmethod
    def read(cls, text: str) -> Slo:
        found = re.fullmatch(r"(ttft|tpot)=(\d+(?:\.\d+)?)(ms|s)", text)
        if found is None or not float(found[2]):
            raise InvalidRequest(f"--slo is such as tpot=40ms or ttft=0.5s, not {text!r}")
        return cls(found[1], float(found[2]) * UNITS[found[3]])


@dataclass(frozen=True, slots=True)
class Measured:
    """One way to decode at one batch size, as it was measured."""

    group: int
    drafter: str  # as the user named it; PLAIN or DEFAULT
    draft: int | None
    batch: int
    tok_s: float
    ratio: float  # to plain decoding in the same turns
    interval: tuple[float, float] | None
    ttft: float  # seconds, median
    tpot: float  # seconds, median
    void: bool  # the text is degenerate: its speed is no claim

    @property
    def way(self) -> tuple[int, str, int | None]:
        """The way to decode, whatever the batch size. Plain decoding is the same in all engines."""
        return (0, PLAIN, None) if self.drafter == PLAIN else (self.group, self.drafter, self.draft)

    def meets(self, slos: Sequence[Slo]) -> bool:
        return all(getattr(self, slo.name) <= slo.seconds for slo in slos)


@dataclass(frozen=True, slots=True)
class Choice:
    """A way to decode for all batch sizes that are allowed."""

    group: int
    drafter: str
    draft: int | None
    max_sequences: int | None  # sequences at once that keep to the limits of latency; None: no limit was given
    max_draft_batch: int | None  # sequences at once up to which it drafts; None: no limit is needed
    speed: float  # geometric mean of the ratios to plain decoding over the batch sizes
    why: str


def choose(measured: Sequence[Measured], slos: Sequence[Slo]) -> Choice | None:
    """Choose among measured ways; None: none of them keeps to the limits."""
    allowed = [each for each in measured if each.meets(slos)]
    if not allowed:
        return None
    batches = sorted({each.batch for each in allowed})
    ways = dict.fromkeys(each.way for each in allowed)
    choices = [made for way in ways if (made := _weighed(way, allowed, batches)) is not None]
    best = max(choices, key=lambda each: each.speed)
    usual = next((each for each in choices if (each.group, each.drafter) == (0, DEFAULT)), None)
    if usual is not None and usual.speed >= MARGIN * best.speed:
        why = "the fastest" if usual is best else f"within {1 - MARGIN:.0%} of the fastest, and it adapts to the load"
        best = replace(usual, why=why)
    return best if not slos else replace(best, max_sequences=max(batches))


def _weighed(way: tuple[int, str, int | None], allowed: Sequence[Measured], batches: Sequence[int]) -> Choice | None:
    """Weigh a way over all batch sizes; None: it was not measured for the smallest one.

    It does not draft from the first size on at which it is slower than plain decoding, or was not measured. The default
    settings may be slower by MARGIN: they try drafts from time to time."""
    group, drafter, draft = way
    ratios = {each.batch: each.ratio for each in allowed if each.way == way}
    if batches[0] not in ratios:
        return None
    least = MARGIN if draft is None else 1.0
    drafting: list[int] = []
    for batch in batches:
        if drafting and ratios.get(batch, 0.0) < least:
            break
        drafting.append(batch)
    limit = None if len(drafting) == len(batches) or drafter == PLAIN else drafting[-1]
    speed = _mean([ratios[batch] if batch in drafting else 1.0 for batch in batches])
    return Choice(group, drafter, draft, None, limit, speed, "the fastest")


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def nearest(measured: Sequence[Measured], slos: Sequence[Slo]) -> Measured:
    """Return what comes nearest to limits that nothing keeps to."""
    return min(measured, key=lambda each: max(getattr(each, slo.name) / slo.seconds for slo in slos))


def settings(choice: Choice, words: Sequence[str], *, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `serve` for a choice. `words`: the drafters of its engine; `name`: of the one that is
    chosen, for requests; `given`: what the user set."""
    found: dict[str, Any] = dict(given)
    if choice.drafter == PLAIN:
        found["drafter"] = []
    elif choice.draft is None:
        found["drafter"] = list(words)
    else:
        fixed = {"default_drafter": name, "max_draft": choice.draft, "fixed_draft": True}
        found |= {"drafter": [choice.drafter], **fixed}
    for limit in ("max_sequences", "max_draft_batch"):
        if getattr(choice, limit) is not None:
            found[limit] = getattr(choice, limit)
    return found


def yaml(options: Mapping[str, Any], *, comments: Sequence[str]) -> str:
    """Write options as a file for `serve --config`. A value in JSON is one in YAML, too."""
    lines = [f"# {' '.join(line.split())}" for line in comments]
    return "\n".join([*lines, *(f"{name}: {json.dumps(value)}" for name, value in options.items())]) + "\n"
