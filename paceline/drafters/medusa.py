"""Medusa heads that draft: each guesses one position further on, from the target's last hidden state alone.

No head knows the choice of the one before it, so their guesses are combined to a tree. It has the most likely
nodes, up to `max_draft`, as if the heads were independent. Penalties, masks and filters are left to the target:
guesses that they exclude are rejected like any wrong one.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.draft import EMPTY, Draft
from paceline.drafters.base import Ask, FeatureDrafter, Seen
from paceline.drafters.eagle.hidden_states import take_rows
from paceline.drafters.recipe import Recipe
from paceline.drafters.shipped import head_options
from paceline.errors import InvalidRequest
from paceline.kernels.noise import gumbel_noise
from paceline.models.weights import Progress
from paceline.runner.heads.medusa import TorchMedusa
from paceline.runner.heads.protocol import MedusaForward
from paceline.runner.loading.heads import read_medusa
from paceline.runner.loading.models import ReadyModel
from paceline.runner.rounds.protocol import DraftingRound, Seat
from paceline.sampling.sampler import Stream, noise_keys
from paceline.types import Off

MAX_BRANCHES = 8  # guesses of one head that a tree may branch into
BRANCHES_ON_DEVICE = 4  # the same in a round on a device, where each level also has at most as many nodes with children


class MedusaDrafter(FeatureDrafter):
    name = "medusa"

    def __init__(
        self,
        heads: MedusaForward,
        *,
        tap: int,
        max_draft: int = 16,
        min_confidence: float = 0.05,
    ) -> None:
        """`tap`: the target's last tap. Guesses whose path has a probability below `min_confidence` are left out; a
        request's `p_min` replaces it."""
        _check_options(max_draft, min_confidence)
        self.taps = (tap,)
        self.max_draft = max_draft
        self._min_confidence = min_confidence
        self._heads = heads
        # sequence → positions seen, hidden states of a step [sequences, hidden], and the row of its last position there
        self._states: dict[int, tuple[int, Tensor, int]] = {}

    def feed(self, features: Tensor, seen: Sequence[Seen], *, crowded: bool) -> dict[int, Off]:
        last = take_rows(features, [each.rows[-1] for each in seen]).to(self._heads.device)
        for place, each in enumerate(seen):
            self._states[each.key] = each.start + len(each.rows), last, place
        return {}

    def knows(self, page: int) -> bool:
        return True  # only the last hidden state counts, and the last token is always computed

    def stop(self, key: int) -> None:
        self._states.pop(key, None)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        ready = [ask for ask in asks if self._states.get(ask.key, (-1,))[0] == len(ask.tokens) - 1]
        if not ready:
            return [EMPTY] * len(asks)
        logits = self._heads(torch.stack([self._last(ask.key) for ask in ready]))  # [heads, asks, vocab]
        drafts = {ask.key: self._draft(ask, logits[:, i]) for i, ask in enumerate(ready)}
        return [drafts.get(ask.key, EMPTY) for ask in asks]

    def _last(self, key: int) -> Tensor:
        """Return the last hidden state [hidden] of a sequence."""
        _, last, place = self._states[key]
        return last[place]

    def _draft(self, ask: Ask, logits: Tensor) -> Draft:
        """Draft the most likely tree by logits [heads, vocab]."""
        sampler, first = ask.sampler, len(ask.tokens)
        if not sampler.greedy:
            keys = noise_keys(sampler.seed, np.arange(first, first + len(logits)), Stream.TOKEN)
            noise = gumbel_noise(torch.from_numpy(keys), logits.shape[1])
            logits = logits / sampler.params.temperature + noise
        best = torch.topk(logits, min(MAX_BRANCHES, logits.shape[1]), dim=1)
        probabilities = (best.values - torch.logsumexp(logits, dim=1, keepdim=True)).exp()
        floor = self._min_confidence if ask.p_min is None else ask.p_min
        return best_tree(best.indices.tolist(), probabilities.tolist(), count=ask.max_draft, floor=floor)


class MedusaOnDevice:
    """Implements DeviceDrafter: a tree of the heads' guesses, from the last hidden state on the device."""

    finds_fewer = True
    ends_drafts = True
    reader = None
    tree = True

    def __init__(self, heads: TorchMedusa, *, tap: int, max_draft: int = 16, min_confidence: float = 0.05) -> None:
        _check_options(max_draft, min_confidence)
        self.taps = (tap,)
        self.max_draft = max_draft
        self._heads = heads
        self._min_confidence = min_confidence

    def threshold(self, seat: Seat) -> float:
        return self._min_confidence if seat.p_min is None else seat.p_min

    def levels(self, count: int) -> int:
        """Return the levels of a tree of at most `count` tokens."""
        return min(count, self._heads.depth)

    def draft(self, round: DraftingRound) -> None:
        logits = self._heads.on_device(round.last_states())
        levels = self.levels(round.longest)
        round.plant(width=BRANCHES_ON_DEVICE, levels=levels)
        for level in range(levels):
            round.branch(logits[level], level, fitted=False)
        round.prune()


def _check_options(max_draft: int, min_confidence: float) -> None:
    if max_draft < 1 or not 0 <= min_confidence <= 1:
        raise InvalidRequest(f"max_draft {max_draft} must be at least 1, min_confidence {min_confidence} in [0, 1]")


def best_tree(
    tokens: Sequence[Sequence[int]], probabilities: Sequence[Sequence[float]], *, count: int, floor: float
) -> Draft:
    """Draft at most `count` nodes, the most likely first.

    A node's probability is the product of those on the path to it, so a parent comes before its children. `tokens` and
    `probabilities` are indexed by depth and rank, the most likely first."""
    chosen: list[int] = []
    parents: list[int] = []
    waiting: list[tuple[float, int, int, int]] = []  # (-probability, depth, rank, parent)

    def offer(depth: int, rank: int, parent: int, above: float) -> None:
        if depth < len(tokens) and rank < len(tokens[depth]) and above * probabilities[depth][rank] >= floor:
            heapq.heappush(waiting, (-above * probabilities[depth][rank], depth, rank, parent))

    offer(0, 0, -1, 1.0)
    while waiting and len(chosen) < count:
        probability, depth, rank, parent = heapq.heappop(waiting)
        chosen.append(tokens[depth][rank])
        parents.append(parent)
        offer(depth + 1, 0, len(chosen) - 1, -probability)
        offer(depth, rank + 1, parent, -probability / max(probabilities[depth][rank], 1e-30))
    return Draft(tokens=tuple(chosen), parents=tuple(parents))


def recipe(options: str, target: ReadyModel, progress: Progress | None) -> Recipe:
    directory, format, given = head_options(MedusaDrafter.name, options, {})
    ready = read_medusa(directory, target, format=format)
    tap = target.model.config.num_layers
    if target.decoder is not None:
        drafter = MedusaOnDevice(TorchMedusa(ready.heads, dtype=ready.dtype, device=ready.device), tap=tap, **given)
        return Recipe(
            name=MedusaDrafter.name,
            build=lambda context: None,
            how=ready.why,
            pass_bytes=ready.pass_bytes,
            on_device=lambda built, to: drafter,
        )
    return Recipe(
        name=MedusaDrafter.name,
        build=lambda context: MedusaDrafter(ready.forward(threads=context.threads), tap=tap, **given),
        how=ready.why,
        pass_bytes=ready.pass_bytes,
        taps=(tap,),
    )
