"""Trees of several members put together: the union of their paths, of which the nodes that pay are drafted.

    suffix   a ── b ── c        a 0.7, b 0.5, c 0.4
    eagle    a ── d             a 0.8, d 0.3
    union    a ── b ── c        a 0.94: right unless both are wrong; b and c lower, because the head has looked and
             └─── d             says d

A parent is at least as likely as its children, so the nodes in order of confidence are a tree up to any of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.draft import Draft
from paceline.drafters.paying import paying

NOTHING_COMPUTED = Draft(passes=0)  # an empty draft that says nothing of what a pass costs

# A later member that drafted other tokens in a node's place opposes it: its chance becomes this power of itself. Fitted
# to suffix and head over 143 answers: docs/experiments.md, "Several drafters on one request".
OPPOSED_POWER = 1.5


class Union:
    """The drafts of a sequence's members in one round, as one tree, and the nodes of it to draft."""

    __slots__ = ("_by", "_chosen", "_only", "complete", "confidence", "gain", "parents", "passes", "tokens")

    def __init__(self) -> None:
        self.tokens: Sequence[int] = ()
        self.parents: Sequence[int] = ()
        self.confidence: Sequence[float] = ()  # that a node and all its ancestors are accepted
        self.complete = False  # no other member is asked
        self.passes = 0  # that the members' models took
        self.gain = 0.0  # tokens that the chosen nodes are expected to add, less the prices of their rows
        self._only: tuple[Draft, str] | None = None  # the only draft, and its member
        self._by: list[str] = []  # member that drafted a node first, where there are several
        self._chosen: list[int] = []

    def clear(self) -> None:
        """Forget all nodes."""
        self.tokens, self.parents, self.confidence, self._only = (), (), (), None

    def add(self, draft: Draft, confidence: Sequence[float], by: str) -> None:
        """Add the nodes of a member's draft, in each of which it has this confidence."""
        if self.tokens:
            self._merge(draft, confidence, by)
        else:
            self.tokens, self.parents, self.confidence = draft.tokens, _parents(draft), confidence
            self._only = draft, by

    def _merge(self, draft: Draft, confidence: Sequence[float], by: str) -> None:
        known = len(self.tokens)
        tokens, parents = [*self.tokens], [*self.parents]
        self._by, self._only = self._by if self._only is None else [self._only[1]] * known, None
        places = {pair: node for node, pair in enumerate(zip(parents, tokens, strict=True))}
        chances: dict[int, float] = {}  # node → chance of it once its parent is accepted, by the new draft
        said: dict[int, float] = {}  # node → sum of the chances of tokens that the new draft has behind it
        moved: list[int] = []
        for token, parent, own in zip(draft.tokens, _parents(draft), confidence, strict=True):
            above = moved[parent] if parent >= 0 else -1
            node = places.get((above, token), len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(above)
                self._by.append(by)
            chances[node] = _chance(own, confidence, parent)
            said[above] = said.get(above, 0.0) + chances[node]
            moved.append(node)
        merged: list[float] = []
        for node, parent in enumerate(parents):
            if node >= known:
                chance = chances[node]
            elif node in chances:
                chance = 1.0 - (1.0 - _chance(self.confidence[node], self.confidence, parent)) * (1.0 - chances[node])
            else:
                chance = _chance(self.confidence[node], self.confidence, parent)
                chance = chance ** (1.0 + OPPOSED_POWER * said[parent]) if parent in said else chance
            merged.append(chance * merged[parent] if parent >= 0 else chance)
        self.tokens, self.parents, self.confidence = tokens, parents, merged

    def choose(self, prices: Sequence[float], *, limit: int, floor: float, sure: bool = False) -> None:
        """Choose the nodes to draft, the most likely first, and set `gain`, as `paying` does."""
        self._chosen, self.gain = paying(self.confidence, prices, limit=limit, floor=floor, sure=sure)

    def draft(self) -> Draft:
        """Return the draft of the chosen nodes, which hold the parent of each before it; `complete`: of all nodes."""
        if self._only is not None:
            draft, by = self._only
            if self.complete:
                return Draft(draft.tokens, draft.parents, draft.probs, self.passes, (), by)
            if self._chosen == [*range(len(draft.tokens))]:  # the usual case
                return Draft(draft.tokens, draft.parents, None, self.passes, (), by)
        nodes, count = self._chosen, len(self._chosen)
        if not nodes:
            return Draft(passes=self.passes) if self.passes else NOTHING_COMPUTED
        places = {-1: -1} | {node: place for place, node in enumerate(nodes)}
        tokens = tuple([self.tokens[node] for node in nodes])
        parents = tuple([places[self.parents[node]] for node in nodes])
        by = self._only[1] if self._only is not None else "+".join(dict.fromkeys([self._by[node] for node in nodes]))
        return Draft(tokens, () if parents == tuple(range(-1, count - 1)) else parents, None, self.passes, (), by)


def _parents(draft: Draft) -> Sequence[int]:
    return draft.parents or range(-1, len(draft.tokens) - 1)


def _chance(own: float, confidence: Sequence[float], parent: int) -> float:
    """Return the chance of a node once its parent is accepted, by the confidence in both."""
    if parent < 0:
        return own
    return own / confidence[parent] if confidence[parent] else 0.0
