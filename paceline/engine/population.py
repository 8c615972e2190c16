"""Populations: how far past drafts were right, by drafter and kind of work. A new sequence starts from them.

    position     0     1     2     3       of a token in its draft; later ones count at the last position
    judged      90    60    48    40       drafts that were right up to there, decayed
    right       60    48    40    36       of these, drafts that were right there, too
    survival   .67   .80   .83   .90       right / judged

Where a kind of work has few drafts, those of all kinds fill in. Where few drafts came to a position, the position
before it does. The governors of the host and of a device share the populations. A sequence takes its numbers when it
begins, and its own drafts come on top (`engine.pace`).
"""

from __future__ import annotations

from paceline.work_kinds import WorkKind

POSITIONS = 6  # positions with a survival of their own
# Chosen by the likelihood of drafts: docs/experiments.md, "Survival from past drafts (2026-11-20)".
DECAY = 0.99  # weight of the past at each draft that comes to a position: about a hundred drafts count
FIRST_RATE, FIRST_WEIGHT = 0.7, 3.0  # survival before any draft, and the drafts that it weighs as much as
ALL_KINDS_WEIGHT = 20.0  # drafts of a kind that those of all kinds weigh as much as
KNOWN_DRAFTS = 32  # drafts from which on a population may be doubted
DOUBT = 0.9  # part of what is known that is left after a sequence that it kept from drafting
MIN_SURVIVAL = 0.01
RECENT_DECAY = 0.95  # weight of the past at each draft, for `found` and `rate`


class Population:
    """Past drafts of one drafter, for one kind of work or for all of them."""

    __slots__ = (
        "_all_kinds",
        "_judged",
        "_level_right",
        "_levels",
        "_right",
        "depth",
        "drafts",
        "found",
    )

    def __init__(self, all_kinds: Population | None = None) -> None:
        """`all_kinds`: the drafter's population of all kinds; None: this is that one."""
        self.drafts = 0  # drafts that were judged
        self.found: float = 1.0 if all_kinds is None else all_kinds.found  # share of recent drafts that had any token
        self.depth: float = 0.0 if all_kinds is None else all_kinds.depth  # levels of a draft, mean of recent ones
        self._all_kinds = all_kinds
        self._right, self._judged = [0.0] * POSITIONS, [0.0] * POSITIONS
        self._levels = FIRST_WEIGHT if all_kinds is None else ALL_KINDS_WEIGHT  # judged levels, decayed
        self._level_right = self._levels * (FIRST_RATE if all_kinds is None else all_kinds.rate)  # right ones of them

    @property
    def rate(self) -> float:
        """Probability that a drafted token is right, given that all before it are: one for all positions."""
        return self._level_right / self._levels

    def learn(self, drafted: int, accepted: int) -> None:
        """Count a draft with `drafted` levels, of which `accepted` were right."""
        self.found += (1 - RECENT_DECAY) * ((drafted > 0) - self.found)
        if self._all_kinds is not None:
            self._all_kinds.learn(drafted, accepted)
        if not drafted:
            return
        self.drafts += 1
        self.depth += (drafted - self.depth) * (1 - RECENT_DECAY if self.drafts > KNOWN_DRAFTS else 1 / self.drafts)
        levels, right, judged = accepted + (accepted < drafted), self._right, self._judged
        self._level_right = RECENT_DECAY * self._level_right + accepted
        self._levels = RECENT_DECAY * self._levels + levels
        for level in range(levels):
            place = level if level < POSITIONS else POSITIONS - 1
            right[place] = DECAY * right[place] + (level < accepted)
            judged[place] = DECAY * judged[place] + 1

    def survival(self) -> tuple[float, ...]:
        """Return the probability that a drafted token is right, given that all before it are, by position."""
        found = []
        usual, before = None if self._all_kinds is None else self._all_kinds.survival(), FIRST_RATE
        for place, (right, judged) in enumerate(zip(self._right, self._judged, strict=True)):
            assumed, weight = (before, FIRST_WEIGHT) if usual is None else (usual[place], ALL_KINDS_WEIGHT)
            before = max((right + weight * assumed) / (judged + weight), MIN_SURVIVAL)
            found.append(before)
        return tuple(found)

    @property
    def is_known(self) -> bool:
        """Whether a sequence may be kept from drafting by what is known, before its first draft."""
        return (self.drafts if self._all_kinds is None else self._all_kinds.drafts) >= KNOWN_DRAFTS

    def doubt(self) -> None:
        """Forget a part: a sequence is kept from drafting, so that hardly any new drafts can show a change."""
        self._right = [DOUBT * each for each in self._right]
        self._judged = [DOUBT * each for each in self._judged]
        if self._all_kinds is not None:
            self._all_kinds.doubt()


NOBODY = Population()  # of a sequence that has not begun; it learns nothing


class Populations:
    def __init__(self) -> None:
        self._known: dict[tuple[str | None, WorkKind | None], Population] = {}  # drafter, kind; None: all kinds

    def of(self, drafter: str | None, kind: WorkKind | None) -> Population:
        """Return past drafts of a drafter for a kind of work. None: the kind is not known, and all drafts count."""
        known = self._known.get((drafter, kind))
        if known is None:
            all_kinds = None if kind is None else self.of(drafter, None)
            known = self._known[drafter, kind] = Population(all_kinds)
        return known

    def forget(self, drafter: str) -> None:
        """Forget a drafter that was unloaded: another one may get its name."""
        self._known = {key: known for key, known in self._known.items() if key[0] != drafter}
