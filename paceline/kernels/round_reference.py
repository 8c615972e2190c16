"""The operations of a round between forward passes, in plain torch: the oracle of kernels/cuda, also run on CPUs.

    layout   make the rows of a pass from the committed tokens and the draft behind them
    draw     draw tokens from logits, as sampling/sampler.py defines it
    push     write a drafted token behind the committed ones
    accept   commit the part of the draft that the target agrees with: new tokens, new lengths

A *seat* is one sequence of the batch, and `seats` has the lane of each; seats of the dummy lane pad the batch. Results
go into tensors of the caller, and the host reads no value. The result of a row or a seat never depends on the others.
Probabilities are summed as integers, so that no order of addition can change which tokens a filter keeps:
`filter_floor` is the definition of sampling/filters.py in its plainest form.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.kernels.base import PAGE_SIZE
from paceline.kernels.noise import gumbel_noise, noise_of
from paceline.sampling.filters import EXPONENTIAL as EXPONENTIAL
from paceline.sampling.filters import FAINT as FAINT
from paceline.sampling.filters import LOG2_E as LOG2_E
from paceline.sampling.filters import MASS_BITS as MASS_BITS
from paceline.sampling.filters import mass as host_mass
from paceline.sampling.sampler import Stream

# How often a token that a head gives the probability p is the target's own, see drafters/draft_in_progress.py:
# DRAWN[0] + DRAWN[1] · √p if both draw with the same noise, BEST[0] · p / (1 + BEST[1] · p) if both take the best one.
DRAWN, BEST = (0.22, 0.65), (2.5, 1.5)


class DeviceLanes(Protocol):
    """The lanes of a device, see runner/rounds/device_state.py. All but `dummy` are tensors [lanes + 1, …]."""

    dummy: int  # lane of seats that pad a batch
    tokens: Tensor  # int32 [lanes + 1, width]
    lengths: Tensor  # int32; committed tokens
    pages: Tensor  # int32 [lanes + 1, pages]
    inverse_temperature: Tensor  # float32; 0: greedy
    top_k: Tensor  # int32; 0: off
    top_p: Tensor  # float32; 1: off
    min_p: Tensor  # float32; 0: off
    seed: Tensor  # int64, the bits of the unsigned seed
    predicted: Tensor  # int32 [lanes + 1, width, or 0 if no drafter reads it]; the text that a request predicts
    predicted_lengths: Tensor  # int32; 0: nothing is predicted
    drift: Tensor  # int32; expected place in the prediction - position in the sequence


class Doubt(NamedTuple):
    """Confidence in the draft of each row's seat, tensors [rows]: a draft below its threshold gets no more tokens."""

    confidence: Tensor  # float32: the drafter's estimate that all tokens so far are right; below 0: no draft
    thresholds: Tensor  # float32
    limits: Tensor  # int32: most tokens of the draft
    found: Tensor  # int32: tokens of the draft so far
    turn: int  # tokens that were drawn before this one


# ── draw ──


def draw(
    logits: Tensor,
    state: DeviceLanes,
    *,
    lanes: Tensor,
    out: Tensor,
    positions: Tensor | None = None,
    offset: int = 0,
    push: bool = False,
    ids: Tensor | None = None,
    doubt: Doubt | None = None,
    free: Tensor | None = None,
    floors: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Draw one token for each row: `out` int32 [rows] from logits [rows, vocab] of the sequences in `lanes` [rows].

    A token's position is `positions[row] + offset`; without `positions` it is the lane's length + `offset`. With `push`
    it is also written to this position. `ids` int32 [vocab] are the tokens of the columns, None: 0, 1, …; of equal
    scores the first column wins. `doubt` is updated. Rows that are not 0 in `free` int32 [rows] are drawn with the
    noise of a drafter, keyed by the lane's length as well: see drafters/draft_in_progress.py. `floors` float32 [rows]
    gets the smallest scaled logit that the filters of each row leave, -inf if it has none.
    """
    lane = lanes.long()
    at = (state.lengths[lane] if positions is None else positions) + offset  # [rows]
    values = torch.where(logits.isnan(), -torch.inf, logits.float())
    inverse_temperatures = state.inverse_temperature[lane]
    scaled = values * torch.where(inverse_temperatures > 0, inverse_temperatures, 1.0)[:, None]
    floor = torch.where(_is_filtered(state, lane, logits.shape[1]), filter_floor(scaled, state, lane), -torch.inf)
    scaled = scaled.masked_fill(scaled < floor, -torch.inf)
    if floors is not None:
        floors.copy_(floor[:, 0])
    keys = noise_keys(state.seed[lane], at, Stream.TOKEN)
    if free is not None:
        place = (state.lengths[lane].long() << 32) + at
        keys = torch.where(free[:, None] != 0, noise_keys(state.seed[lane], place, Stream.DRAFT), keys)
    noise = gumbel_noise(keys, logits.shape[1]) if ids is None else noise_of(keys, ids.long())
    column = torch.where(inverse_temperatures > 0, (scaled + noise).argmax(-1), values.argmax(-1))
    out.copy_(column if ids is None else ids[column])
    if doubt is not None:
        probability = values.softmax(-1).gather(1, column[:, None])[:, 0]
        update_doubt(doubt, probability, drawn=inverse_temperatures > 0)
    if push:
        write_tokens(state, lane, at, out)


def update_doubt(doubt: Doubt, probability: Tensor, *, drawn: Tensor) -> None:
    """Count the token of each unfinished draft, to which the drafter gives this `probability` [rows]."""
    confidence = doubt.confidence
    going = (confidence >= 0) & (confidence >= doubt.thresholds) & (doubt.turn < doubt.limits)
    best = BEST[0] * probability / (1 + BEST[1] * probability)
    right = torch.where(drawn, DRAWN[0] + DRAWN[1] * probability.sqrt(), best)
    doubt.found.copy_(torch.where(going, doubt.turn + 1, doubt.found))
    doubt.confidence.copy_(torch.where(going, confidence * right, confidence))


def spread(logits: Tensor, ids: Tensor, *, vocab: int) -> Tensor:
    """Return logits [rows, vocab] of a head's logits [rows, columns]: -inf for tokens that are not among its `ids`."""
    whole = logits.new_full((len(logits), vocab), -torch.inf)
    return whole.index_copy_(1, ids.long(), logits)


def _is_filtered(state: DeviceLanes, lane: Tensor, vocab: int) -> Tensor:
    """Return which lanes filter a vocabulary of this size, bool [lanes, 1]."""
    top_k = state.top_k[lane, None]
    filters = ((top_k > 0) & (top_k < vocab)) | (state.top_p[lane, None] < 1) | (state.min_p[lane, None] > 0)
    return filters & (state.inverse_temperature[lane, None] > 0)


def filter_floor(scaled: Tensor, state: DeviceLanes, lane: Tensor) -> Tensor:
    """Find the smallest of the scaled logits [rows, vocab] that min-p, top-k and top-p leave, as [rows, 1]."""
    vocab = scaled.shape[1]
    ordered = scaled.sort(dim=-1, descending=True).values
    best = ordered[:, :1]
    min_p = state.min_p[lane, None]
    floor = torch.where(min_p > 0, best + min_p.double().log().float(), -torch.inf)
    top_k = state.top_k[lane, None].long()
    kept = torch.where(top_k > 0, top_k.clamp(max=vocab), vocab)
    floor = torch.maximum(floor, ordered.gather(1, kept - 1))
    top_p = state.top_p[lane, None]
    masses = torch.where(ordered >= floor, mass(ordered - best), 0)  # [rows, vocab]
    wanted = (top_p.double() * masses.sum(-1, keepdim=True).double()).long()
    inside = masses.cumsum(-1) - masses < wanted
    nucleus = ordered.gather(1, inside.sum(-1, keepdim=True).clamp(min=1) - 1)
    return torch.where(top_p < 1, torch.maximum(floor, nucleus), floor)


def mass(below: Tensor) -> Tensor:
    """Compute `filters.mass` for a tensor."""
    return torch.from_numpy(host_mass(below.cpu().numpy())).to(below.device)


def mix(seeds: Tensor, positions: Tensor, stream: Stream) -> Tensor:
    """Compute `sampler.mix` for seeds int64 [n] and positions [n]: 64 bits each, as int64 [n]."""
    counter = positions.long() * len(Stream) + int(stream)
    return _finalise(seeds ^ _finalise(counter * _signed(0x9E3779B97F4A7C15) + _signed(0xD1B54A32D192ED03)))


def uniforms(seeds: Tensor, positions: Tensor, stream: Stream) -> Tensor:
    """Compute `sampler.uniforms`: float64 in (0, 1), one for each seed int64 and position."""
    return (_shift(mix(seeds, positions, stream), 11).double() + 0.5) * 2.0**-53


def noise_keys(seeds: Tensor, positions: Tensor, stream: Stream) -> Tensor:
    """Compute pairs of 32-bit keys, int64 [n, 2], for `gumbel_noise`."""
    bits = mix(seeds, positions, stream)
    return torch.stack((_shift(bits, 32), bits & 0xFFFFFFFF), dim=1)


def _finalise(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shift(bits, 27)) * _signed(0x94D049BB133111EB)
    return bits ^ _shift(bits, 31)


def _shift(bits: Tensor, count: int) -> Tensor:
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


# ── layout ──


def layout(
    state: DeviceLanes,
    *,
    seats: Tensor,
    counts: Tensor,
    first: int,
    tokens: Tensor,
    positions: Tensor,
    slots: Tensor,
    owners: Tensor,
    row_starts: Tensor,
    pdl: bool = False,
) -> None:
    """Make the rows of a pass: seat b gets `counts[b]` tokens from its length + `first` on, never before position 0.

        rows     │ seat 0 │ seat 1      │ padding │        row_starts [seats + 1] = 0, …, rows in use
        tokens, positions, slots, owners (lanes): [rows]

    If there are too few rows, `counts` is cut, later seats first; every seat keeps one row, and there are no more seats
    than rows. Padding is token 0 at position 0 of the dummy lane, on the scratch page.
    """
    lane, rows = seats.long(), len(tokens)
    extra = (counts - 1).clamp(min=0)
    before = extra.cumsum(0) - extra
    counts.copy_(1 + torch.minimum(extra, (rows - len(seats) - before).clamp(min=0)))
    row_starts[0].zero_()
    row_starts[1:].copy_(counts.cumsum(0))
    row = torch.arange(rows, device=tokens.device, dtype=torch.int32)
    seat = torch.searchsorted(row_starts[1:], row, right=True)
    used = seat < len(seats)
    seat = seat.clamp(max=len(seats) - 1)
    owner = torch.where(used, lane[seat], state.dummy)
    at = state.lengths[owner] + first + row - row_starts[seat]
    at = torch.where(used, at.clamp(min=0, max=state.tokens.shape[1] - 1), 0).long()
    tokens.copy_(torch.where(used, state.tokens[owner, at], 0))
    positions.copy_(at)
    slots.copy_(state.pages[owner, at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE)
    owners.copy_(owner)


def put_masks(state: DeviceLanes, seats: Tensor, mask: int, count: int) -> None:
    """Write `count` tokens `mask` behind the committed tokens of each seat. It launches, and waits for nothing."""
    lanes = seats.long()[:, None].expand(-1, count)
    at = (state.lengths[lanes] + torch.arange(count, device=seats.device)).clamp(max=state.tokens.shape[1] - 1)
    state.tokens[lanes, at.long()] = torch.full_like(seats, mask)[:, None]  # of a number, the host would send a copy


# ── accept, push ──


def accept(
    state: DeviceLanes,
    *,
    seats: Tensor,
    targets: Tensor,
    out: Tensor,
    row_starts: Tensor | None = None,
    roots: Tensor | None = None,
    verdicts: Tensor | None = None,
    synthetic_acceptance: float = 0.0,
    pdl: bool = False,
) -> None:
    """Commit the drafted tokens that the target agrees with, and the target's own token after them.

    `targets` int32 [rows] are the tokens that the target draws after each row. Rows from `row_starts[b]` to
    `row_starts[b + 1] - 1` of seat b are the last committed token and its draft. At the end of a prompt there is no
    draft: then `roots[b]` is the seat's only row. Seats of the dummy lane change nothing. For a longest draft of k, the
    outcome is `out` int32 [seats, 2 + 2 * (k + 1)], unused entries 0:

        accepted │ drafted │ new tokens [k + 1] │ drafted tokens [k] │ new length

    `verdicts` int32 [seats, 2] are decisions of other rules: accepted tokens, and the token after them. Where the first
    one is negative, the target's tokens decide.

    `synthetic_acceptance` > 0 is for benchmarks with random weights: it is the probability that a token is accepted.
    """
    lane, longest = seats.long(), out.shape[1] // 2 - 2
    start, drafted = _rows_of(seats, row_starts, roots)
    drafted = drafted.clamp(max=longest)
    real = lane != state.dummy
    step = torch.arange(longest + 1, device=seats.device)
    length = state.lengths[lane].long()
    at = (length[:, None] + step).clamp(max=state.tokens.shape[1] - 1)  # [seats, k + 1]
    ahead = state.tokens[lane[:, None], at]
    judged = targets[(start[:, None] + step).clamp(max=len(targets) - 1)]
    right = ahead == judged
    if synthetic_acceptance > 0:
        right = coin(state.seed[lane][:, None], at, synthetic_acceptance)
    accepted = (right & (step < drafted[:, None])).long().cumprod(1).sum(1)
    bonus = judged.gather(1, accepted[:, None])
    if verdicts is not None and synthetic_acceptance <= 0:
        decided = verdicts[:, 0] >= 0
        accepted = torch.where(decided, verdicts[:, 0].long(), accepted)
        bonus = torch.where(decided, verdicts[:, 1], bonus[:, 0])[:, None]
    new = torch.where(step < accepted[:, None], ahead, torch.where(step == accepted[:, None], bonus, 0))
    guess = torch.where(step < drafted[:, None], ahead, 0)[:, :longest]
    after = length + accepted + 1
    report = torch.cat([accepted[:, None], drafted[:, None], new, guess, after[:, None]], dim=1)
    out.copy_(torch.where(real[:, None], report, 0))
    write_tokens(state, lane, length + accepted, bonus[:, 0], where=real)
    state.lengths[lane] = torch.where(real, after, length).int()


def _rows_of(seats: Tensor, row_starts: Tensor | None, roots: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the first row and the number of drafted tokens of each seat, int64 [seats]."""
    if roots is not None:
        return roots.long(), torch.zeros_like(roots, dtype=torch.int64)
    assert row_starts is not None, "either row_starts or roots must be given"
    return row_starts[:-1].long(), row_starts.long().diff() - 1


def coin(seeds: Tensor, positions: Tensor, probability: float) -> Tensor:
    """Draw True with the given probability for each (seed, position)."""
    return _shift(mix(seeds, positions, Stream.ACCEPT), 40) < int(probability * 2**24)


def push(state: DeviceLanes, *, seats: Tensor, tokens: Tensor, offset: int, pdl: bool = False) -> None:
    """Write tokens [seats] at `offset` behind the committed tokens."""
    lane = seats.long()
    write_tokens(state, lane, state.lengths[lane] + offset, tokens)


def write_tokens(state: DeviceLanes, lane: Tensor, at: Tensor, tokens: Tensor, where: Tensor | None = None) -> None:
    """Write tokens [n] to positions `at` [n] of their lanes; those past the width are dropped."""
    inside = at < state.tokens.shape[1]
    at = at.clamp(max=state.tokens.shape[1] - 1).long()
    wanted = inside if where is None else inside & where
    state.tokens[lane, at] = torch.where(wanted, tokens.int(), state.tokens[lane, at])
