"""Find drafts in known texts, in plain torch: the definition of kernels/cuda/lookup.py, also run on CPUs.

The last committed tokens of a sequence are looked for in its own text, as drafters/ngram.py does, and in the text that
its request predicts, as drafters/prediction.py does. What follows the longest match is the draft.

    own text     the latest of the longest matches
    prediction   the nearest of the longest matches to where the answer would be, had it gone on in step with the
                 prediction since the last match of two tokens; a short match counts only near that place

Of matches of the same length, that in the prediction is taken.

`copy_sure` lets what follows a long match in the own text take the place of a draft that a network has made.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.round_reference import DeviceLanes
from paceline.kernels.tree_reference import TreeLanes

SIZE_SHIFT = 24  # bits; a found n-gram is (its length << SIZE_SHIFT) + the position where it ends
DRAFTED = 1 << 30  # bit of a report of `copy_sure`: the seat had a draft before
# Chosen on edits of code and text: docs/experiments.md, "Predictions: where to look again after an edit".
MAX_MATCH_TOKENS = 6  # longest match that is counted, in tokens
FAR_MATCH_TOKENS = 3  # shortest match further than `NEAR_TOKENS` from the expected place
NEAR_TOKENS = 8  # distance from the expected place, within which a match of one token is enough
SURE_TOKENS = 2  # shortest match that moves the expected place


def lookup(
    state: DeviceLanes,
    *,
    seats: Tensor,
    limits: Tensor,
    min_ngram: int,
    max_ngram: int,
    found: Tensor,
    predicted: bool = False,
    pdl: bool = False,
) -> None:
    """Write drafts of at most `limits` [seats] tokens behind the committed ones; `found` [seats] gets their lengths.

    `predicted`: look in the predictions of the lanes, too, and update `state.drift`."""
    lane, width = seats.long(), state.tokens.shape[1]
    assert width < 1 << SIZE_SHIFT, f"{width} tokens a lane do not fit a key"
    history = state.tokens[lane]  # [seats, width]
    length = state.lengths[lane].long()[:, None]
    end = torch.arange(width, device=seats.device)  # an n-gram is history[end - size : end]
    size = _matched(history, length, history, length, max_ngram)
    key = torch.where(size >= min_ngram, (size << SIZE_SHIFT) + end, 0).amax(1, keepdim=True)
    source = torch.where(key > 0, key & ((1 << SIZE_SHIFT) - 1), 0)
    count = torch.minimum(limits.long()[:, None], width - length).clamp(min=0)  # [seats, 1]
    step = (end - length).clamp(min=0)  # [seats, width]
    copied = history.gather(1, source + step % (length - source))
    if predicted:
        place, matched = _find_predicted(state, lane, history, length, max_ngram)
        known = state.predicted[lane].gather(1, (place + step).clamp(max=state.predicted.shape[1] - 1))
        follows = (matched > 0) & (matched >= key >> SIZE_SHIFT)
        copied = torch.where(follows, known, copied)
        left = state.predicted_lengths[lane].long()[:, None] - place
        count = torch.where(follows, torch.minimum(count, left), torch.where(key > 0, count, 0))
    else:
        count = torch.where(key > 0, count, 0)
    found.copy_(count[:, 0])
    state.tokens[lane] = torch.where((end >= length) & (end - length < count), copied, history)


def copy_sure(
    state: TreeLanes,
    *,
    seats: Tensor,
    limits: Tensor,
    sure: Tensor,
    min_ngram: int,
    max_ngram: int,
    found: Tensor,
    matches: Tensor,
    ahead: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Let a copy, at most `limits` [seats] tokens, take the place of a seat's draft where its text repeats surely.

    That is where the longest match in the own text has at least `sure` [seats] tokens; 0: never. `found` [seats] has
    the lengths of the drafts, and gets those of the copies, which are chains. `matches` [seats] gets the longest match
    of every seat, used or not: its size << SIZE_SHIFT + the position where it ends, + DRAFTED if there was a draft.
    `ahead` [seats] gets the lane into which further drafted tokens go: the dummy lane where a copy must stay."""
    lane, width = seats.long(), state.tokens.shape[1]
    assert width < 1 << SIZE_SHIFT, f"{width} tokens a lane do not fit a key"
    assert max_ngram << SIZE_SHIFT < DRAFTED, f"a match of {max_ngram} tokens does not fit a report"
    history = state.tokens[lane]  # [seats, width]
    length = state.lengths[lane].long()[:, None]
    end = torch.arange(width, device=seats.device)
    size = _matched(history, length, history, length, max_ngram)
    key = torch.where(size >= min_ngram, (size << SIZE_SHIFT) + end, 0).amax(1, keepdim=True)
    key = torch.where(lane[:, None] == state.dummy, 0, key)
    source = key & ((1 << SIZE_SHIFT) - 1)
    count = torch.minimum(limits.long()[:, None], width - length).clamp(min=0)
    copies = (sure[:, None] > 0) & (key >> SIZE_SHIFT >= sure[:, None]) & (count > 0)  # [seats, 1]
    copied = history.gather(1, source + (end - length).clamp(min=0) % (length - source))
    matches.copy_((key[:, 0] + torch.where(found > 0, DRAFTED, 0)).int())
    found.copy_(torch.where(copies[:, 0], count[:, 0], found))
    if ahead is not None:
        ahead.copy_(torch.where(copies[:, 0], state.dummy, seats))
    state.tokens[lane] = torch.where(copies & (end >= length) & (end - length < count), copied, history)
    chain = torch.arange(-1, state.parents.shape[1] - 1, dtype=torch.int32, device=seats.device)
    state.parents[lane] = torch.where(copies, chain, state.parents[lane])


def _find_predicted(
    state: DeviceLanes, lane: Tensor, history: Tensor, length: Tensor, max_ngram: int
) -> tuple[Tensor, Tensor]:
    """Return the place in each prediction from which it goes on, and how many tokens match before it; 0: none.

    Both are int64 [seats, 1]."""
    text, expected = state.predicted[lane], length + state.drift[lane][:, None]
    size = _matched(text, state.predicted_lengths[lane].long()[:, None], history, length, max_ngram)
    distance = (torch.arange(text.shape[1], device=lane.device) - expected).abs()
    enough = (size >= FAR_MATCH_TOKENS) | ((size > 0) & (distance <= NEAR_TOKENS))
    later = torch.arange(text.shape[1], device=lane.device) > expected
    value = torch.where(enough, (size << SIZE_SHIFT) - 2 * distance + later, 0)
    place = value.argmax(1, keepdim=True)
    matched = torch.where(enough, size, 0).gather(1, place)
    moved = torch.where(matched >= SURE_TOKENS, place - length, state.drift[lane][:, None])
    state.drift[lane] = moved[:, 0].int()
    return place, matched


def _matched(text: Tensor, stop: Tensor, history: Tensor, length: Tensor, most: int) -> Tensor:
    """Count the last tokens of each history that stand before each place of a text of `stop` tokens, at most `most`.

    Returns int64 [seats, width of the text]; 0 at places behind which the text has nothing."""
    end = torch.arange(text.shape[1], device=text.device)
    alive = (end >= 1) & (end < stop)
    size = torch.zeros_like(text, dtype=torch.int64)
    for back in range(1, most + 1):
        same = text[:, (end - back).clamp(min=0)] == history.gather(1, (length - back).clamp(min=0))
        alive = alive & (end >= back) & (back <= length) & same
        size += alive
    return size
