"""The operations of a round that verifies trees, in plain torch: the oracle of kernels/cuda/tree.py, also run on CPUs.

    tree_layout   make the rows of the verification: the last committed token, then the nodes of each seat's tree
    tree_accept   walk each tree along the tokens that the target draws, and commit the path
    tree_moves    find the KV slots of accepted nodes that are out of place, and the slots of their positions

Nodes stand behind the committed tokens in `tokens`, in the order of rows. `parents` has the node that each one follows,
-1 for the last committed token. Parents stand before their children, so the first nodes of a tree are a tree again.

    parents   -1  0  0  -1  3             row    0   1   2   3   4   5     row 0 is the last committed token
    nodes      0  1  2   3  4             slot  L-1  L  L+1 L+2 L+3 L+4    by the order of rows
                                          at    L-1  L  L+1 L+1  L  L+1    position by depth

`tails` has the slots of the path to each leaf; the first tails of a seat's rows are used, in the order of leaves. All
rows on the path to a leaf can read its tail, as rows of a chain do, up to their own positions: `leads` says which tail
a row reads. So attention reads a tail for each leaf instead of each row.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from paceline.kernels.base import PAGE_SIZE
from paceline.kernels.round_reference import DeviceLanes, coin, layout, write_tokens


class TreeLanes(DeviceLanes, Protocol):
    """The lanes of a device that verifies trees."""

    parents: Tensor  # int32 [lanes + 1, max_draft]; see Draft


def tree_layout(
    state: TreeLanes,
    *,
    seats: Tensor,
    counts: Tensor,
    tokens: Tensor,
    positions: Tensor,
    slots: Tensor,
    owners: Tensor,
    row_starts: Tensor,
    bases: Tensor,
    tails: Tensor,
    leads: Tensor,
    ancestors: Tensor,
    pdl: bool = False,
) -> None:
    """Make the rows of a verification: seat b gets its last committed token and `counts[b]` - 1 nodes.

    As `layout` does it, with positions by depth, and with `bases` [seats], `tails` [rows, most] and `leads` [rows]. No
    tree has more than `most` nodes. If there are too few rows, trees lose their last nodes. Unused entries of `tails`
    are left as they are, and `leads` of a row that only pads the pass is the row itself. `ancestors` [rows, most] has
    the tokens of each node's path, its own last, filled up with -1.
    """
    layout(
        state,
        seats=seats,
        counts=counts,
        first=-1,
        tokens=tokens,
        positions=positions,
        slots=slots,
        owners=owners,
        row_starts=row_starts,
    )
    rows, most = tails.shape
    bases.copy_(state.lengths[seats.long()])
    row = torch.arange(rows, device=tokens.device)
    seat = torch.searchsorted(row_starts[1:].contiguous(), row.int(), right=True).clamp(max=len(seats) - 1)
    first = row_starts[seat].long()  # row of the seat's last committed token
    used = row < row_starts[-1]
    path = row[:, None].expand(rows, rows) == row  # [row, other]: whether the other is on its path
    at, steps = row, torch.zeros_like(row)
    parents = parents_of(state, owners.long(), most)
    for _ in range(most):
        inner = used & (at > first)
        node = (at - first - 1).clamp(min=0, max=most - 1)
        at = torch.where(inner, first + 1 + parents[row, node], at)
        path = path | (at[:, None] == row)
        steps += inner
    positions.copy_(torch.where(used, bases[seat] - 1 + steps, 0).clamp(max=state.tokens.shape[1] - 1))
    ancestors.fill_(-1)
    below, node = (path & used[:, None] & (row > first[:, None])).nonzero(as_tuple=True)
    ancestors[below, steps[node] - 1] = tokens[node]
    is_leaf = (path.sum(0) == 1) & used
    leaves = is_leaf.long().cumsum(0)
    before = (leaves - is_leaf.long())[first]  # leaves of earlier seats
    order = torch.where(used, first + leaves - 1 - before, row)  # tail of each leaf
    on_path = path & is_leaf[:, None] & (row > first[:, None])  # [leaf, node]
    leaf, node = on_path.nonzero(as_tuple=True)
    tails[order[leaf], steps[node] - 1] = slots[node]
    leads.copy_(torch.where(path.T & (is_leaf | ~used), order, rows).amin(1))


def tree_accept(
    state: TreeLanes,
    *,
    seats: Tensor,
    row_starts: Tensor,
    targets: Tensor,
    out: Tensor,
    verdicts: Tensor | None = None,
    synthetic_acceptance: float = 0.0,
    pdl: bool = False,
) -> None:
    """Commit the path of each tree that the target agrees with, and the target's own token after it.

    From the last committed token on, the child whose token the target has drawn is accepted; of several, the first.
    The committed tokens then stand in order. `out` int32 [seats, 4 + 4k] for trees of at most k nodes begins as that of
    `accept`; unused entries are 0:

        accepted │ drafted │ new tokens [k + 1] │ drafted tokens [k] │ new length │ path [k] │ parents [k]

    `verdicts` int32 [seats, 2] are decisions of other rules: the last row of the path, 0 for the last committed token,
    and the token after it. Where the first one is negative, the target's tokens decide.

    `synthetic_acceptance` > 0 is for benchmarks: it is the probability that a node's first child is accepted; its other
    children never are. The coins are those of a chain.
    """
    lane, longest = seats.long(), out.shape[1] // 4 - 1
    start = row_starts[:-1].long()
    drafted = (row_starts.long().diff() - 1).clamp(max=longest)[:, None]
    real = (lane != state.dummy)[:, None]
    node = torch.arange(longest, device=seats.device)
    length = state.lengths[lane].long()[:, None]
    there = node < drafted  # [seats, k]
    ahead = state.tokens[lane[:, None], (length + node).clamp(max=state.tokens.shape[1] - 1)]
    parents = torch.where(there, parents_of(state, lane, longest), longest)
    at, accepted = torch.full_like(length, -1), torch.zeros_like(length)
    path = torch.zeros_like(ahead)
    going = real.clone()
    decided = torch.full_like(seats, -1) if verdicts is None or synthetic_acceptance > 0 else verdicts[:, 0]
    lives = _path_to(decided.long()[:, None] - 1, parents)
    for step in range(longest):
        right = ahead == targets[(start[:, None] + at + 1).clamp(max=len(targets) - 1)]
        right = torch.where(decided[:, None] >= 0, lives, right)
        if synthetic_acceptance > 0:
            right = coin(state.seed[lane][:, None], length + step, synthetic_acceptance).expand_as(ahead)
        child = torch.where((parents == at) & right, node, longest).amin(1, keepdim=True)
        going = going & (child < longest)
        at = torch.where(going, child, at)
        path[:, step] = torch.where(going, child, 0)[:, 0]
        accepted += going
    place = torch.arange(longest + 1, device=seats.device)
    own = targets[(start[:, None] + at + 1).clamp(max=len(targets) - 1)]
    if verdicts is not None:
        own = torch.where(decided[:, None] >= 0, verdicts[:, 1:], own)
    chosen = torch.cat([ahead.gather(1, path.long()), torch.zeros_like(own)], dim=1)
    new = torch.where(place < accepted, chosen, torch.where(place == accepted, own, 0))
    guess, reported = torch.where(there, ahead, 0), torch.where(there, parents, 0)
    after = length + accepted + 1
    report = torch.cat([accepted, drafted, new, guess, after, path, reported], dim=1)
    out.copy_(torch.where(real, report, 0))
    for each in range(longest + 1):
        kept = real[:, 0] & (each <= accepted[:, 0])
        write_tokens(state, lane, length[:, 0] + each, new[:, each], where=kept)
    state.lengths[lane] = torch.where(real, after, length)[:, 0].int()


def _path_to(node: Tensor, parents: Tensor) -> Tensor:
    """Return bool [seats, k]: True for the nodes on the way from the root to `node` [seats, 1]; -1 is the root."""
    every = torch.arange(parents.shape[1], device=parents.device)
    path = torch.zeros_like(parents, dtype=torch.bool)
    for _ in every:
        path = path | (every == node)
        node = torch.where(node >= 0, parents.gather(1, node.clamp(min=0)).long(), -1)
    return path


def parents_of(state: TreeLanes, lane: Tensor, count: int) -> Tensor:
    """Return the parents of the lanes' first nodes [lanes, count]; one that does not stand before its child is cut."""
    node = torch.arange(count, device=lane.device, dtype=torch.int32)
    return torch.minimum(state.parents[lane, :count], node - 1).clamp(min=-1)


def tree_moves(state: DeviceLanes, *, seats: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Return the KV slots of the accepted nodes and those of their positions, int32 [seats, k], after `tree_accept`.

    Both are the same where nothing was accepted. All must be read before any is written."""
    longest = out.shape[1] // 4 - 1
    lane, step = seats.long()[:, None], torch.arange(longest, device=seats.device)
    accepted, after, path = (
        out[:, :1],
        out[:, 3 + 2 * longest : 4 + 2 * longest],
        out[:, 4 + 2 * longest :][:, :longest],
    )
    start = after - accepted - 1
    moved = step < accepted

    def slot(at: Tensor) -> Tensor:
        at = torch.where(moved, at, 0).clamp(min=0, max=state.tokens.shape[1] - 1).long()
        return state.pages[lane, at // PAGE_SIZE] * PAGE_SIZE + (at % PAGE_SIZE).int()

    return slot(start + path), slot(start + step)
