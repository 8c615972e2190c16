"""Drafters for tests: one that knows the answer and corrupts it, ones that raise, hang or talk nonsense, and one that a
device runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paceline.draft import Draft
from paceline.drafters.base import Ask, Drafter
from paceline.runner.rounds.protocol import DraftingRound
from tests.tiny_models import VOCAB


class Scripted(Drafter):
    """Knows what plain decoding says and proposes it, each token wrong with probability `wrong`.

    A chain, or a tree of the right tokens among wrong siblings that have children of their own. With `probs` it says
    that it was certain, which only the rejection rule may believe.
    """

    name = "scripted"

    def __init__(
        self,
        scripts: Iterable[Sequence[int]],
        *,
        wrong: float = 0.3,
        tree: bool = False,
        probs: bool = False,
        vocab_size: int = VOCAB,
        seed: int = 0,
    ) -> None:
        self._scripts = [np.asarray(script) for script in scripts]
        self._wrong = wrong
        self._tree = tree
        self._probs = probs
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(seed)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._draft(self._next(ask.tokens), ask.max_draft) for ask in asks]

    def _next(self, tokens: np.ndarray) -> list[int]:
        for script in self._scripts:
            if len(script) > len(tokens) and np.array_equal(script[: len(tokens)], tokens):
                return [int(token) for token in script[len(tokens) :]]
        return []

    def _draft(self, truth: list[int], longest: int) -> Draft:
        length = int(self._random.integers(0, longest + 1))
        if self._tree:
            return self._branching(truth, length)
        guess = [self._corrupt(token) for token in truth[:length]]
        probs = torch.nn.functional.one_hot(torch.tensor(guess, dtype=torch.int64), self._vocab_size).float()
        return Draft(tokens=tuple(guess), probs=probs if self._probs and guess else None)

    def _corrupt(self, token: int) -> int:
        return int(self._random.integers(self._vocab_size)) if self._random.random() < self._wrong else token

    def _branching(self, truth: list[int], length: int) -> Draft:
        """Nodes until `length`, each the right child of the right path or something wrong anywhere."""
        tokens: list[int] = []
        parents: list[int] = []
        right = -1  # the node the right path has come to
        ahead = list(truth)
        while len(tokens) < length:
            go_on = ahead and self._random.random() > self._wrong
            token = ahead.pop(0) if go_on else int(self._random.integers(self._vocab_size))
            parent = right if go_on else int(self._random.integers(-1, len(tokens)))
            if (parent, token) in zip(parents, tokens, strict=True) or (not go_on and ahead[:1] == [token]):
                continue
            tokens.append(token)
            parents.append(parent)
            right = len(tokens) - 1 if go_on else right
        return Draft(tokens=tuple(tokens), parents=tuple(parents))


class Silent(Drafter):
    """Does nothing, properly; the others go wrong in one method."""

    name = "odd"

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [Draft(tokens=(1,) * ask.max_draft) for ask in asks]


@dataclass(frozen=True)
class AgainOnDevice:
    """A DeviceDrafter that guesses that the last token is said again; half as often as it may, if it `finds_fewer`."""

    finds_fewer: bool = False
    reader: None = None

    def draft(self, round: DraftingRound) -> None:
        state, lanes = round.state, round.lanes.long()
        lengths = state.lengths[lanes].long()
        last = state.tokens[lanes, lengths - 1]
        for turn in range(round.longest):
            state.tokens[lanes, lengths + turn] = last
        if self.finds_fewer:
            round.found.copy_(round.limits() // 2)


class TreesOnDevice:
    """A DeviceDrafter of random trees. It knows what plain decoding says: the right path is somewhere in most of them.

    Its work is tensor operations alone, so that a captured round can replay it: the tree of a seat is one of many that
    were made beforehand, by the length of its text."""

    reader = None
    finds_fewer = True
    tree = True
    SHAPES = 101

    def __init__(
        self, scripts: Iterable[Sequence[int]], *, nodes: int, wrong: float = 0.4, vocab_size: int = VOCAB
    ) -> None:
        random = np.random.default_rng(5)
        texts = [*map(list, scripts)]
        self._scripts = torch.full((len(texts), 16 + max(map(len, texts))), -1, dtype=torch.int32)
        for text, script in zip(texts, self._scripts, strict=True):
            script[: len(text)] = torch.tensor(text)
        made = [self._shape(random, nodes, wrong) for _ in range(self.SHAPES)]
        self._parents, self._depths, self._wrong, self._counts = (
            torch.tensor(part).int() for part in zip(*made, strict=True)
        )
        self._vocab_size = vocab_size

    def _shape(
        self, random: np.random.Generator, nodes: int, wrong: float
    ) -> tuple[list[int], list[int], list[int], int]:
        """Parents, depths, and for each node how far its token is from the right one of its depth."""
        parents: list[int] = []
        depths: list[int] = []
        right = -1  # the node that the right path has come to
        offsets: list[int] = []
        for node in range(nodes):
            goes_on = random.random() > wrong
            parents.append(right if goes_on else int(random.integers(-1, node)) if node else -1)
            depths.append(depths[parents[-1]] + 1 if parents[-1] >= 0 else 0)
            offsets.append(0 if goes_on else 1 + node)
            right = node if goes_on else right
        return parents, depths, offsets, int(random.integers(nodes + 1))

    def draft(self, round: DraftingRound) -> None:
        state, lanes = round.state, round.lanes.long()
        if self._scripts.device != state.device:
            self.__dict__ |= {name: x.to(state.device) for name, x in vars(self).items() if isinstance(x, torch.Tensor)}
        lengths, width = state.lengths[lanes].long(), self._scripts.shape[1]
        shape, nodes = (lengths * 7 + lanes) % self.SHAPES, min(round.longest, self._parents.shape[1])
        at = torch.arange(width, device=state.device)
        text = state.tokens[lanes][:, :width]
        text = torch.nn.functional.pad(text, (0, width - text.shape[1]))
        known = ((self._scripts[:, None] == text) | (at >= lengths[:, None])).all(2)  # [scripts, seats]
        script = self._scripts[known.int().argmax(0)]  # [seats, width]
        ahead = (lengths[:, None] + self._depths[shape, :nodes]).clamp(max=width - 1)
        drafted = (script.gather(1, ahead.long()) + self._wrong[shape, :nodes]) % self._vocab_size
        places = lengths[:, None] + torch.arange(nodes, device=state.device)
        state.tokens[lanes[:, None], places] = drafted.int()
        state.parents[lanes, :nodes] = self._parents[shape, :nodes]
        round.found.copy_(torch.minimum(self._counts[shape], round.limits()))


METHODS = ("start", "propose", "observe", "learn", "stop")


def raising(method: str) -> Silent:
    def fail(*_: Any) -> Any:
        raise RuntimeError("a drafter of bad character")

    drafter = Silent()
    setattr(drafter, method, fail)
    return drafter


def hanging(method: str, released: threading.Event) -> Silent:
    """Never comes back from `method` until the test is over."""
    drafter = Silent()
    proper = getattr(drafter, method)

    def hang(*arguments: Any) -> Any:
        released.wait()
        return proper(*arguments)

    drafter.inline = False
    setattr(drafter, method, hang)
    return drafter


class Nonsense(Silent):
    def __init__(self, answer: Callable[[Sequence[Ask]], Any]) -> None:
        self._answer = answer

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        answer: list[Draft] = self._answer(asks)
        return answer


def _each(make: Callable[[Ask], Any]) -> Callable[[Sequence[Ask]], Any]:
    return lambda asks: [make(ask) for ask in asks]


def _probs(ask: Ask, value: float) -> torch.Tensor:
    return torch.full((ask.max_draft, VOCAB), value)


def _scribble(ask: Ask) -> Draft:
    ask.tokens[:] = 0
    return Draft(tokens=(1,))


NONSENSE: Mapping[str, Callable[[Sequence[Ask]], Any]] = {
    "none": lambda asks: None,
    "a number": lambda asks: 7,
    "a generator": lambda asks: (Draft() for _ in asks),
    "too few": lambda asks: [Draft()] * (len(asks) - 1),
    "too many": lambda asks: [Draft()] * (len(asks) + 1),
    "not drafts": _each(lambda ask: (1, 2)),
    "too long": _each(lambda ask: Draft(tokens=(1,) * (ask.max_draft + 1))),
    "token too large": _each(lambda ask: Draft(tokens=(VOCAB,))),
    "token negative": _each(lambda ask: Draft(tokens=(-1,))),
    "token a float": _each(lambda ask: Draft(tokens=(1.5,))),
    "token a bool": _each(lambda ask: Draft(tokens=(True,))),
    "token of numpy": _each(lambda ask: Draft(tokens=(np.int64(3),))),
    "tokens a number": _each(lambda ask: Draft(tokens=5)),
    "tokens a text": _each(lambda ask: Draft(tokens="a")),
    "tokens none": _each(lambda ask: Draft(tokens=None)),
    "tokens a tensor": _each(lambda ask: Draft(tokens=torch.tensor([1]))),
    "parents a number": _each(lambda ask: Draft(tokens=(1,), parents=5)),
    "parents too many": _each(lambda ask: Draft(tokens=(1,), parents=(-1, 0))),
    "parent of itself": _each(lambda ask: Draft(tokens=(1,), parents=(0,))),
    "parent negative": _each(lambda ask: Draft(tokens=(1,), parents=(-2,))),
    "parent a float": _each(lambda ask: Draft(tokens=(1,), parents=(-1.0,))),
    "siblings alike": lambda asks: [Draft(tokens=(4, 4), parents=(-1, -1))] * len(asks),
    "probs NaN": _each(lambda ask: Draft((1,) * ask.max_draft, probs=_probs(ask, torch.nan))),
    "probs infinite": _each(lambda ask: Draft((1,) * ask.max_draft, probs=_probs(ask, torch.inf))),
    "probs negative": _each(lambda ask: Draft((1,) * ask.max_draft, probs=_probs(ask, -1.0 / VOCAB))),
    "probs too large": _each(lambda ask: Draft((1,) * ask.max_draft, probs=_probs(ask, 1.0))),
    "probs of another shape": _each(lambda ask: Draft((1,) * ask.max_draft, probs=torch.ones(1, 1))),
    "probs of numpy": _each(lambda ask: Draft((1,), probs=np.full((1, VOCAB), 1 / VOCAB))),
    "probs a text": _each(lambda ask: Draft((1,), probs="likely")),
    "probs bool": _each(lambda ask: Draft((1,), probs=torch.eye(VOCAB, dtype=torch.bool)[1:2])),
    "probs against its token": _each(lambda ask: Draft((1,), probs=torch.eye(VOCAB)[2:3])),
    "probs of a tree": lambda asks: [Draft((1, 2), (-1, -1), probs=torch.full((2, VOCAB), 1 / VOCAB))] * len(asks),
    "writes into the tokens": _each(_scribble),
}
