"""Offers: drafters on the host draft for the rounds of a device, beside a step in flight.

When a step is launched, the host does not know yet what the step before it will commit. So a drafter is asked for a
continuation of the text that the host knows, which is longer than the step in flight. The device aligns it
(`kernels.offer_reference`): the part behind what was committed is the draft.

    known to the host   … a b │                     asked: continue after b
    step in flight            │ c d                 may commit up to `in_flight.most` tokens
    offer                     │ c d e f g           e f g is the draft of the next step

A predicted text is offered somewhat further. If the step in flight leaves it, the device looks for the last tokens in
the offer, and drafts what follows them.

A drafter that is not inline answers when it can. Its answer is used as long as the text agrees with it, and nobody
waits for it: meanwhile its sequences decode plainly.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from paceline.draft import Draft
from paceline.engine.governor import Governor
from paceline.engine.host_drafters import HostDrafters
from paceline.engine.scheduler import Work
from paceline.engine.sequence import Sequence
from paceline.kernels.lookup_reference import NEAR_TOKENS
from paceline.runner.rounds.protocol import SPARE_OFFERED, Offer


@dataclass(frozen=True, slots=True)
class Answer:
    """A continuation that a drafter has proposed."""

    drafter: str
    start: int  # committed tokens when the drafter was asked
    tokens: tuple[int, ...]

    def after(self, tokens: Seq[int]) -> tuple[int, ...]:
        """Return the part behind these committed tokens; empty if they differ from the answer or go beyond it."""
        known = len(tokens) - self.start
        return self.tokens[known:] if not known or self.tokens[:known] == (*tokens[self.start :],) else ()


class Offers:
    def __init__(self, drafters: HostDrafters, governor: Governor, clock: Callable[[], float]) -> None:
        self._drafters = drafters
        self._governor = governor
        self._clock = clock
        self._answers: dict[int, Answer] = {}  # sequence → the latest continuation for it

    def make(self, works: Seq[Work], *, free: float) -> dict[int, Offer]:
        """Ask the drafters for works that want a draft of the host, and return the offers by sequence key.

        A work without an offer decodes plainly. `free`: seconds for which the device is busy anyway, in which drafting
        costs nothing."""
        asking: dict[str, list[Work]] = {}
        for work in works:
            asking.setdefault(work.drafter or "", []).append(work)
        for name, mine in asking.items():
            self._ask(name, mine, free)
        offers = {work.sequence.key: self._offer(work) for work in works}
        return {key: offer for key, offer in offers.items() if offer is not None}

    def forget(self, sequence: Sequence) -> None:
        self._answers.pop(sequence.key, None)

    def _ask(self, name: str, works: Seq[Work], free: float) -> None:
        began = self._clock()
        answered = self._drafters.guards[name].exchange(self._drafters.asks(name, works))
        tokens = 0
        for ask, draft in answered:
            path = likely_path(draft)
            tokens += len(path)
            self._answers[ask.key] = Answer(name, len(ask.tokens), path)
        if answered:
            seconds = max(self._clock() - began - free, 0.0)
            self._governor.cost.observe_draft(name, tokens=tokens, depth=tokens, seconds=seconds)

    def _offer(self, work: Work) -> Offer | None:
        sequence, answer = work.sequence, self._answers.get(work.sequence.key)
        rest = answer.after(sequence.tokens) if answer is not None and answer.drafter == work.drafter else ()
        work.max_draft = max(min(work.max_draft, len(rest) - sequence.in_flight.least), 0)
        if answer is None or not work.max_draft:
            return None
        work.drafted_from = answer.start
        most = sequence.in_flight.most + work.max_draft
        if self._drafters.guards[answer.drafter].needs_prediction:
            return Offer(len(sequence.tokens), rest[: most + SPARE_OFFERED], near=NEAR_TOKENS)
        return Offer(len(sequence.tokens), rest[:most])


def likely_path(draft: Draft) -> tuple[int, ...]:
    """Return the tokens of a draft's most likely path: from each node to its first child."""
    if draft.is_chain:
        return draft.tokens
    path: list[int] = []
    node = -1
    while node in draft.parents:
        node = draft.parents.index(node)
        path.append(draft.tokens[node])
    return tuple(path)
