"""Lookahead decoding: the target guesses several places ahead at once, and its guesses become n-grams (Fu et al. 2024).

A window of guesses lies ahead of the text, in `ngram` - 1 levels of `window` columns. Level j of column i is a guess
for the token i + j places behind the last one; level 0 of column 0 is the last token itself. All of them ride in the
verification as branches of the draft, since a guess sees exactly its ancestors there:

    last ─┬─ a1 ─┬─ a2 ─┬─ a3            level 0, a chain of the columns' first guesses
          b0     b1     b2     b3        level 1 of each column, behind its guess of level 0 (and so on)

The target's best token behind the last level of a column completes an n-gram, which goes into the pool of its first
token. The levels then move up: each guess was made from a better one (a Jacobi step). N-grams of the pool that begin
with the last token are drafted beside the window. What is accepted, of either, is a token of the target's own.

Pools belong to one sequence. Logits stay on a GPU: a CPU runs this drafter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.draft import Draft
from paceline.drafters.base import Ask, Drafter, Verified
from paceline.drafters.options import parse_options
from paceline.drafters.recipe import Recipe
from paceline.errors import InvalidRequest
from paceline.models.weights import Progress
from paceline.runner.loading.models import ReadyModel

NAME = "lookahead"
LIMITS = {"window": (2, 32), "ngram": (2, 8), "pool": (1, 32)}
MAX_DRAFT = 64  # tokens of a draft, at most
STRIDE = 7  # places between the tokens of the text that a new window begins with

Path = tuple[int, ...]


@dataclass(slots=True)
class _State:
    """The window of one sequence, and its pool."""

    levels: list[list[int]]  # [ngram - 1][window] guesses
    length: int  # committed tokens for which the columns stand
    pool: dict[int, OrderedDict[Path, None]] = field(default_factory=dict)  # first token → rests, the latest last

    def path(self, column: int) -> Path:
        """Return the tokens from the first behind the last committed one to the last level of a column."""
        return (*self.levels[0][1 : column + 1], *(level[column] for level in self.levels[1:]))


class LookaheadDrafter(Drafter):
    name = NAME
    ends_drafts = True
    hears_logits = True

    def __init__(self, *, window: int = 4, ngram: int = 3, pool: int = 3) -> None:
        """`window`: columns. `ngram`: tokens of an n-gram. `pool`: n-grams that are kept, and drafted, for a token."""
        for name, value in (("window", window), ("ngram", ngram), ("pool", pool)):
            low, high = LIMITS[name]
            if not low <= value <= high:
                raise InvalidRequest(f"{NAME}: {name} must be {low} to {high}, not {value}")
        self.max_draft = window - 1 + window * (ngram - 2) + pool * (ngram - 1)
        if self.max_draft > MAX_DRAFT:
            raise InvalidRequest(
                f"{NAME}: window {window}, ngram {ngram} and pool {pool} draft {self.max_draft} tokens, and "
                f"{MAX_DRAFT} are the most: take less of one"
            )
        self._window, self._levels, self._pool = window, ngram - 1, pool
        self._states: dict[int, _State] = {}

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._draft(ask) for ask in asks]

    def hear(self, verified: Sequence[Verified]) -> None:
        for each in verified:
            state = self._states.get(each.key)
            if state is not None and each.draft.tokens:
                self._advance(state, each)

    def stop(self, key: int) -> None:
        self._states.pop(key, None)

    def _draft(self, ask: Ask) -> Draft:
        state = self._states.get(ask.key) or self._begin(ask)
        self._slide(state, ask.tokens)
        known = state.pool.get(int(ask.tokens[-1]), ())
        return tree_of([*reversed(known), *map(state.path, range(self._window))], limit=ask.max_draft)

    def _begin(self, ask: Ask) -> _State:
        levels = [[_filler(ask.tokens, i + j) for i in range(self._window)] for j in range(self._levels)]
        state = self._states[ask.key] = _State(levels, length=len(ask.tokens))
        return state

    def _slide(self, state: _State, tokens: np.ndarray) -> None:
        """Drop the columns of tokens that were committed meanwhile, and begin as many new ones."""
        passed, state.length = min(len(tokens) - state.length, self._window), len(tokens)
        for j, level in enumerate(state.levels):
            new = [_filler(tokens, self._window - passed + i + j) for i in range(passed)]
            level[:] = [*level[passed:], *new]

    def _advance(self, state: _State, said: Verified) -> None:
        """Make an n-gram of each column that was verified, and move the levels up."""
        rows = {path: row for row, path in enumerate([(), *said.draft.paths])}
        places = [rows.get(state.path(column)) for column in range(self._window)]
        if all(place is None for place in places):
            return  # another drafter's draft, or one without room for the window
        newest = [*state.levels[-1]]
        for column, place in enumerate(places):
            if place is not None:
                newest[column] = said.best[place]
                rest = (*(level[column] for level in state.levels[1:]), newest[column])
                self._keep(state, said.token if column == 0 else state.levels[0][column], rest)
        state.levels = [*state.levels[1:], newest]
        state.length += 1  # each guess now stands one place further

    def _keep(self, state: _State, first: int, rest: Path) -> None:
        found = state.pool.setdefault(first, OrderedDict())
        found[rest] = None
        found.move_to_end(rest)
        if len(found) > self._pool:
            found.popitem(last=False)


def tree_of(paths: Sequence[Path], *, limit: int) -> Draft:
    """Return a draft with these paths, as many as fit into `limit` tokens, the first ones first. Beginnings that are
    equal are the same nodes."""
    places: dict[Path, int] = {(): -1}
    parents: list[int] = []
    for path in paths:
        new = [path[: end + 1] for end in range(len(path)) if path[: end + 1] not in places]
        if len(parents) + len(new) <= limit:
            for each in new:
                parents.append(places[each[:-1]])
                places[each] = len(parents) - 1
    return Draft(tuple(path[-1] for path in places if path), tuple(parents), passes=0)


def _filler(tokens: np.ndarray, place: int) -> int:
    """Return a token of the text that a guess begins with; which one hardly matters."""
    return int(tokens[-1 - (STRIDE * (place + 1)) % len(tokens)])


def recipe(options: str, target: ReadyModel, progress: Progress | None) -> Recipe:
    given = parse_options(NAME, options, dict.fromkeys(LIMITS, int))
    drafter = LookaheadDrafter(**given)
    return Recipe(
        name=NAME, build=lambda context: drafter, how="lets the target guess ahead beside its verification, in n-grams"
    )
