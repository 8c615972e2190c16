"""How long the host is busy with a round that only decodes: plain ones, and those with drafts of each drafter.

Masks of grammars take the host longer than all else, so rounds with masks have times of their own. Until both kinds of
round were measured with masks, those without them stand for them.
"""

from __future__ import annotations

from collections import defaultdict

from paceline.runner.rounds.batch_times import BatchTimes


class HostTimes:
    def __init__(self) -> None:
        self._times: defaultdict[tuple[str | None, bool], BatchTimes] = defaultdict(BatchTimes)  # by drafter and masks

    def learn(self, seconds: float, *, drafter: str | None, batch: int, masked: bool = False) -> None:
        """Learn from a round; `drafter`: the one that drafted in it, None if it was plain."""
        self._times[drafter, masked].learn(batch, seconds)

    def of(self, drafter: str | None, *, batch: int) -> float | None:
        """Return the seconds of a round without masks; None: not measured."""
        return self._times[drafter, False].near(batch)

    def pair(self, drafter: str, *, batch: int, masked: bool) -> tuple[float, float] | None:
        """Return the seconds of a plain round and of one with drafts; None: not measured."""
        if masked:
            plain, drafting = (self._times[by, True].near(batch) for by in (None, drafter))
            if plain is not None and drafting is not None:
                return plain, drafting
        plain, drafting = (self.of(by, batch=batch) for by in (None, drafter))
        return None if plain is None or drafting is None else (plain, drafting)

    def forget(self, drafter: str | None) -> None:
        """Forget the rounds with drafts, which are to be measured anew."""
        for masked in (False, True):
            self._times.pop((drafter, masked), None)
