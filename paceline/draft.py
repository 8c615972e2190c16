"""A draft: tokens that a drafter guesses will come next, each with its parent: a tree, which is usually a chain."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from operator import le, lt

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed tokens in topological order: a parent comes before its children.

    parents[i] is the index of the token that token i follows, -1 for the last committed token; an empty `parents`
    means a chain. Siblings differ in their token. `probs` [len, vocab] are the distributions that the tokens were
    drawn from, for rules that want them; None means that the drafter gave each token probability 1. `confidence` is the
    drafter's estimate that a token and all before it on its path are accepted; () if it has none.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    probs: Tensor | None = None
    passes: int | None = None  # passes of the drafter's model that it took; None: one for each level
    confidence: tuple[float, ...] = ()
    by: str | None = None  # members of a portfolio whose draft it is, joined by "+"; None: the drafter that was asked

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return not self.parents or self.parents == tuple(range(-1, len(self.tokens) - 1))

    @property
    def depth(self) -> int:
        """Length of the longest path in tokens: the most that can be accepted."""
        if not self.parents:
            return len(self.tokens)
        depths = [0]  # depth of the last committed token, then of each drafted one
        for parent in self.parents:
            depths.append(depths[parent + 1] + 1)
        return max(depths)

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """Tokens from the last committed one to each drafted token, which is the last of its path."""
        paths: list[tuple[int, ...]] = [()]
        for parent, token in zip(self.parents or range(-1, len(self.tokens) - 1), self.tokens, strict=True):
            paths.append((*paths[parent + 1], token))
        return paths[1:]

    def problem(self, *, vocab_size: int, max_length: int) -> str | None:
        """Say why this draft cannot be verified. None: it can. Drafters are not trusted: law 8 of docs/drafters.md."""
        if not isinstance(self.tokens, tuple) or not isinstance(self.parents, tuple):
            return "tokens or parents that are not a tuple"
        if len(self.tokens) > max_length:
            return f"{len(self.tokens)} tokens where at most {max_length} were asked for"
        if not _are_integers(self.tokens, 0, vocab_size):
            return f"a token outside of the vocabulary of {vocab_size}"
        if self.probs is not None and (problem := self._problem_of_probs(self.probs, vocab_size)):
            return problem
        if self.passes is not None and (type(self.passes) is not int or self.passes < 0):
            return f"passes {self.passes!r} that are no count"
        problem = self._problem_of_parents() if self.parents else None
        return self._problem_of_confidence() if self.confidence and problem is None else problem

    def _problem_of_probs(self, probs: Tensor, vocab_size: int) -> str | None:
        if tuple(probs.shape) != (len(self.tokens), vocab_size):
            return f"probabilities of shape {tuple(probs.shape)}"
        if not probs.is_floating_point():
            return f"probabilities of type {probs.dtype}"
        sums = probs.sum(-1)
        if not bool(((probs.amin(-1) >= 0) & (sums > 0.99) & (sums < 1.01)).all()):  # false for NaN, too
            return "probabilities that are negative or do not add up to 1"
        if not bool((probs[range(len(self.tokens)), list(self.tokens)] > 0).all()):
            return "a token that its own probabilities exclude"
        return None if self.is_chain else "probabilities for a tree, where only a chain may have them"

    def _problem_of_parents(self) -> str | None:
        if len(self.parents) != len(self.tokens):
            return f"{len(self.parents)} parents for {len(self.tokens)} tokens"
        if not _are_integers(self.parents, -1, len(self.tokens)) or not all(map(lt, self.parents, count())):
            return "a parent that does not stand before its child"
        if len(set(zip(self.parents, self.tokens, strict=True))) != len(self.tokens):
            return "two siblings with the same token"
        return None

    def _problem_of_confidence(self) -> str | None:
        given = self.confidence
        if len(given) != len(self.tokens) or not all(0.0 <= each <= 1.0 for each in given):  # false for NaN, too
            return "a confidence that is not one probability for each token"
        above = [given[parent] if parent >= 0 else 1.0 for parent in self.parents] if self.parents else (1.0, *given)
        return None if all(map(le, given, above)) else "a confidence that grows along a path"


def _are_integers(values: tuple[int, ...], low: int, high: int) -> bool:
    """True if all are of type int, which excludes bool and numpy's, and within [low, high)."""
    return not values or ({*map(type, values)} == {int} and low <= min(values) and max(values) < high)


EMPTY = Draft()
