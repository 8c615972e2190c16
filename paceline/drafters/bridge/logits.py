"""The logits of a drafter in the target's vocabulary.

Each token of the drafter stands for the target's tokens of the same bytes: usually one, sometimes several. Its logit
becomes that of the first of them, so that it is drawn with the target's noise at that token. Where several tokens of
the drafter begin with the same one of the target, the likeliest counts. Tokens that the target cannot write, and those
of the target that no token of the drafter begins with, are impossible.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.text.bridge import OneWay


@dataclass(frozen=True, slots=True)
class TargetLogits:
    """Brings logits of a drafter to the target's vocabulary, and drawn tokens back."""

    meanings: dict[int, tuple[int, ...]]  # a token of the drafter → the target's tokens of its bytes
    _sources: Tensor  # int64 [target's vocabulary]: the drafter's only or first token, or one past its last
    _others: Tensor  # int64 [n]: further tokens of the drafter
    _firsts: Tensor  # int64 [n]: the target's tokens that they begin with
    _rivals: dict[int, Tensor]  # a token of the target → all tokens of the drafter that begin with it, if several

    @classmethod
    def of(cls, way: OneWay, *, model_vocab_size: int, vocab_size: int) -> TargetLogits:
        meanings = {token: ids for token in range(model_vocab_size) if (ids := way.token(token))}
        meanings = {token: ids for token, ids in meanings.items() if max(ids) < vocab_size}
        starts: defaultdict[int, list[int]] = defaultdict(list)
        for token, ids in meanings.items():
            starts[ids[0]].append(token)
        sources = torch.full((vocab_size,), model_vocab_size)
        for first, tokens in starts.items():
            sources[first] = tokens[0]
        others = [(token, first) for first, tokens in starts.items() for token in tokens[1:]]
        table = torch.tensor(others, dtype=torch.int64).view(-1, 2)
        rivals = {first: torch.tensor(tokens) for first, tokens in starts.items() if len(tokens) > 1}
        return cls(meanings, sources, table[:, 0].contiguous(), table[:, 1].contiguous(), rivals)

    def __call__(self, logits: Tensor) -> Tensor:
        """Bring logits [rows, drafter's vocabulary] to [rows, target's vocabulary]."""
        padded = torch.nn.functional.pad(logits, (0, 1), value=-torch.inf)
        found = padded.index_select(1, self._sources)
        if len(self._others):
            index = self._firsts.expand(len(logits), -1)
            found.scatter_reduce_(1, index, logits.index_select(1, self._others), "amax")
        return found

    def source(self, token: int, logits: Tensor) -> int | None:
        """Return the drafter's token that a token of the target was drawn for, by the drafter's logits [vocabulary].

        None: there is no such token."""
        rivals = self._rivals.get(token)
        if rivals is not None:
            return int(rivals[logits[rivals].argmax()])
        found = int(self._sources[token])
        return found if found < len(logits) else None
