"""Growth of trees that a head drafts, in plain torch: the oracle of kernels/cuda/growth.py, also run on CPUs.

    root ── the ── cat ── sat      A pass of the head reads at most `width` nodes of a seat. Each gives its `width`
         │     └── dog             best tokens, with or without noise. A node's confidence is its parent's times the
         └─ a ──── cat             probability that the target accepts it. The best nodes of a level are read next.

    branch   find the best tokens after each row, and the probability that the target accepts each
    grow     add them to the trees, and lay out the rows of the next pass
    prune    write the best nodes of each tree behind the committed tokens: the draft

Keys and values of nodes go to slots behind the committed text, in the order in which nodes are read; a node's row sees
the text and its own ancestors (`tails`). A row of the head has the position before its token, see runner/heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.base import PAGE_SIZE
from paceline.kernels.noise import gumbel_noise, noise_of
from paceline.kernels.round_reference import noise_keys
from paceline.kernels.tree_reference import TreeLanes
from paceline.sampling.sampler import Stream

# Probability that the target's own token is the head's token of a rank: kernels/cpu/candidates.c has the same numbers.
# Drawn with noise, the logistic function of (weight of √probability, of a distance in nats, of the rank, constant).
FIRST_DRAWN = (0.83, 0.74, 0.0, -1.25)
OTHER_DRAWN = (1.06, -0.56, -0.24, -1.31)
AHEAD_MAX = 6.0  # nats; a larger lead makes the best token no more likely to be accepted
FIRST_BEST = (0.8, 0.2)  # without noise: of (weight of the best token's logarithmic odds, constant)


@dataclass(frozen=True, slots=True)
class Growth:
    """The trees of a round while they grow, and the rows of the next pass. Level 0 has the children of the root."""

    width: int
    levels: int
    confidence: Tensor  # float32 [seats, nodes]; below 0: no node
    tokens: Tensor  # int32 [seats, nodes]
    parents: Tensor  # int32 [seats, nodes]: a node; -1: the root
    chosen: Tensor  # int32 [seats, width]: node that each row of the next pass reads; -1: none
    top_tokens: Tensor  # int32 [seats · width, width]: the best tokens after each row of the last pass
    top_chances: Tensor  # float32 [seats · width, width]: probability that the target accepts each
    row_tokens: Tensor  # int32 [seats · width], of the next pass as all below
    positions: Tensor  # int32 [seats · width]
    slots: Tensor  # int32 [seats · width]
    ends: Tensor  # int32 [seats · width + 1]: row r continues row ends[r + 1] - 1 of the last pass
    bases: Tensor  # int32 [seats]
    tails: Tensor  # int32 [2, seats · width, levels]: by the parity of the level that laid them out
    row_starts: Tensor  # int32 [seats + 1]
    leads: Tensor  # int32 [seats · width]: each row reads its own tail

    @classmethod
    def empty(cls, *, seats: int, width: int, levels: int, device: torch.device | str) -> Growth:
        assert width >= 1, f"a width of {width}"
        rows, nodes = seats * width, width + (levels - 1) * width * width

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            width=width,
            levels=levels,
            confidence=torch.full((seats, nodes), -1.0, device=device),
            tokens=ints(seats, nodes),
            parents=ints(seats, nodes),
            chosen=ints(seats, width),
            top_tokens=ints(rows, width),
            top_chances=torch.zeros((rows, width), device=device),
            row_tokens=ints(rows),
            positions=ints(rows),
            slots=ints(rows),
            ends=ints(rows + 1),
            bases=ints(seats),
            tails=ints(2, rows, levels),
            row_starts=torch.arange(0, rows + 1, width, dtype=torch.int32, device=device),
            leads=torch.arange(rows, dtype=torch.int32, device=device),
        )

    def first(self, level: int) -> int:
        """Return the index of the first node of a level."""
        return 0 if level == 0 else self.width + (level - 1) * self.width * self.width


def branch(
    logits: Tensor,
    state: TreeLanes,
    growth: Growth,
    *,
    seats: Tensor,
    level: int,
    ids: Tensor | None = None,
    fitted: bool = True,
    pdl: bool = False,
) -> None:
    """Find the best tokens after the rows of a level: logits [seats · rows each, vocab], into `top_tokens` and
    `top_chances`.

    `ids` int32 [vocab] are the tokens of the columns, None: 0, 1, …. With `fitted`, chances are those of an EAGLE-3
    head's tokens, else the probabilities of the scores: noisy logits, or logits where nothing is drawn. Filters are
    left to the target. Noise may be rough: a wrong order of nearly equal tokens costs nothing."""
    each, lane = len(logits) // len(seats), seats.long()
    lane = lane.repeat_interleave(each)
    values = torch.where(logits.isnan(), -torch.inf, logits.float())
    scale = state.inverse_temperature[lane][:, None]
    keys = noise_keys(state.seed[lane], state.lengths[lane] + level, Stream.TOKEN)
    noise = gumbel_noise(keys, logits.shape[1]) if ids is None else noise_of(keys, ids.long())
    scores = torch.where(scale > 0, values * scale + noise, values)
    ordered = scores.sort(dim=1, descending=True, stable=True)
    best, columns = ordered.values[:, : max(2, growth.width)], ordered.indices[:, : growth.width]
    names = columns if ids is None else ids.long()[columns]
    source = values if fitted else scores
    probability = source.softmax(1).gather(1, columns).nan_to_num(0.0)
    chances = _fitted(probability, best, scale) if fitted else probability
    growth.top_tokens[: len(logits)].copy_(names)
    growth.top_chances[: len(logits)].copy_(chances.nan_to_num(0.0))


def _fitted(probability: Tensor, best: Tensor, scale: Tensor) -> Tensor:
    """Return the probability that the target accepts tokens [rows, width], given the best noisy scores [rows, …] and
    the inverse temperature [rows, 1]. Distances of scores count in nats of the logits below temperature 1."""
    rank = torch.arange(probability.shape[1], device=probability.device)
    unit = scale.clamp(min=1.0)
    ahead = ((best[:, :1] - best[:, 1:2]) / unit).clamp(max=AHEAD_MAX)
    behind = (best[:, :1] - best[:, : probability.shape[1]]) / unit
    root = probability.sqrt()
    first, other = FIRST_DRAWN, OTHER_DRAWN
    noisy = torch.where(
        rank == 0,
        first[0] * root + first[1] * ahead + first[3],
        other[0] * root + other[1] * behind + other[2] * rank + other[3],
    ).sigmoid()
    plain = torch.where(rank == 0, (FIRST_BEST[0] * probability.logit() + FIRST_BEST[1]).sigmoid(), probability)
    return torch.where(scale > 0, noisy, plain)


def grow(
    state: TreeLanes,
    growth: Growth,
    *,
    seats: Tensor,
    level: int,
    roots: Tensor,
    ends: Tensor,
    thresholds: Tensor,
    limits: Tensor,
    shared: bool = False,
    pdl: bool = False,
) -> None:
    """Add the candidates of `branch` as the nodes of a level, and lay out the rows of the next pass.

    `roots` float32 [seats] is 1, or below 0 where a seat gets no draft. The first pass had rows `ends[b]` to
    `ends[b + 1]` - 1 of seat b, and the last of them gave the candidates of level 0. Nodes with less confidence than
    `thresholds` [seats] are dropped, except the best child of the root. `limits` int32 [seats] bounds the nodes of a
    draft, and the slots that its rows use. With `shared`, all nodes of a level have the same candidates, one row for
    each seat: heads that do not know each other's choices, and have no keys and values."""
    width, count, lane = growth.width, len(seats), seats.long()
    parents = torch.full((count, 1), -1, dtype=torch.int32, device=seats.device) if level == 0 else growth.chosen
    rows = parents.shape[1]
    above = growth.confidence.gather(1, parents.clamp(min=0).long())
    above = torch.where(parents >= 0, above, roots[:, None] if level == 0 else -1.0)  # [seats, rows]
    each = 1 if shared else rows
    tokens, chances = (
        x[: count * each].view(count, each, width).expand(count, rows, width)
        for x in (growth.top_tokens, growth.top_chances)
    )
    own = above[:, :, None] * chances
    kept = (own >= thresholds[:, None, None]) | ((level == 0) & (torch.arange(width, device=seats.device) == 0))
    own = torch.where(kept & (above >= 0)[:, :, None] & (limits > 0)[:, None, None], own, -1.0).flatten(1)
    here = slice(growth.first(level), growth.first(level) + rows * width)
    growth.confidence[:, here] = own
    growth.tokens[:, here] = tokens.flatten(1)
    growth.parents[:, here] = parents.repeat_interleave(width, dim=1)
    if level + 1 == growth.levels:
        return
    order = own.sort(dim=1, descending=True, stable=True).indices[:, :width]  # [seats, width]
    place = level * width + torch.arange(width, device=seats.device)
    read = (own.gather(1, order) >= 0) & ((place <= limits[:, None]) | shared)
    length = state.lengths[lane][:, None]
    at = (length - 1 + place).clamp(max=state.tokens.shape[1] - 1).long()
    slot = state.pages[lane[:, None], at // PAGE_SIZE] * PAGE_SIZE + (at % PAGE_SIZE).int()
    slot = torch.where(read, slot, state.pages[state.dummy, 0] * PAGE_SIZE)
    origin = order // width
    first = torch.arange(count, device=seats.device)[:, None] * width
    growth.chosen.copy_(torch.where(read, growth.first(level) + order, -1))
    growth.row_tokens.copy_(torch.where(read, growth.tokens[:, here].gather(1, order), 0).flatten())
    growth.positions.copy_((length - 1 + level).expand(count, width).flatten())
    growth.slots.copy_(slot.flatten())
    carry = ends[1:, None].long() if level == 0 else first + origin + 1
    growth.ends[1:].copy_(carry.clamp(min=1).expand(count, width).flatten())
    growth.bases.copy_(length[:, 0] - 1)
    old, new = growth.tails[level % 2], growth.tails[(level + 1) % 2]
    new[:, :level].copy_(old[(first + origin).flatten(), :level])
    new[:, level].copy_(slot.flatten())


def prune(state: TreeLanes, growth: Growth, *, seats: Tensor, limits: Tensor, found: Tensor, pdl: bool = False) -> None:
    """Write the best nodes of each tree, at most `limits` [seats], as its draft; `found` [seats] gets their number.

    Nodes are written by confidence. A parent has at least that of its children and a lower index, so it comes first."""
    own, count = growth.confidence, growth.confidence.shape[1]
    index = torch.arange(count, device=own.device)
    better = (own[:, None, :] > own[:, :, None]) | ((own[:, None, :] == own[:, :, None]) & (index < index[:, None]))
    rank = better.sum(2)  # [seats, nodes]
    most = torch.minimum(limits, torch.full_like(limits, state.parents.shape[1]))[:, None]
    kept = (own >= 0) & (rank < most) & (seats != state.dummy)[:, None]
    above = torch.where(growth.parents >= 0, rank.gather(1, growth.parents.clamp(min=0).long()), -1)
    lane = seats.long()[:, None].expand_as(rank)
    at = state.lengths[lane].long() + rank
    inside = kept & (at < state.tokens.shape[1])
    state.tokens[lane[inside], at[inside]] = growth.tokens[inside]
    state.parents[lane[kept], rank[kept]] = above[kept].int()
    found.copy_(kept.sum(1))
