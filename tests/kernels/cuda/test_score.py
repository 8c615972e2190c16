"""Log-probabilities on a device against the reference: the same ranks and tokens, and nearly the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.kernels import score_reference
from paceline.kernels.cuda import score
from paceline.types import MAX_LOGPROBS
from tests.tiny_models import ON_GPU


def random_logits(rows: int, vocab: int, device: torch.device, *, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return (4 * torch.randn((rows, vocab), generator=random)).to(device)


def ints(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def check(logits: Tensor, rows: list[int], tokens: list[int], top: int, **edited: Tensor) -> Tensor:
    """Score by the kernel and by the reference, compare, and return the kernel's report."""
    device = logits.device
    mine, other = (torch.full((len(rows), 2 + 2 * top), -7, dtype=torch.int32, device=device) for _ in range(2))
    options = {"rows": ints(rows, device), "tokens": ints(tokens, device), **edited}
    score.score(logits, out=mine, **options, pdl=ON_GPU)
    score_reference.score(logits, out=other, **options)
    for ours, theirs, row in zip(mine, other, rows, strict=True):
        if row < 0:
            assert (ours == -7).all()
            continue
        assert ours[1] == theirs[1], "ranks differ"
        assert torch.equal(ours[2 : 2 + top], theirs[2 : 2 + top]), "other tokens, or another order"
        for place in (slice(1), slice(2 + top, None)):
            torch.testing.assert_close(
                ours[place].view(torch.float32), theirs[place].view(torch.float32), rtol=1e-5, atol=1e-5
            )
    return mine


@pytest.mark.unwatched
@pytest.mark.parametrize("top", [0, 1, 5, 20, MAX_LOGPROBS])
@pytest.mark.parametrize("vocab", [128, 4097, 9001])
def test_as_the_reference(vocab: int, top: int, device: torch.device) -> None:
    logits = random_logits(4, vocab, device)
    best = int(logits[2].argmax())
    check(logits, [0, 3, -1, 2, 2], [5, vocab - 1, 0, best, 0], top)


@pytest.mark.skipif(not ON_GPU, reason="the interpreter takes too long for it")
@pytest.mark.parametrize("top", [0, 5, 20])
def test_a_large_vocabulary(top: int, device: torch.device) -> None:
    check(random_logits(16, 128_256, device), [*range(16)], [*range(16)], top)


@pytest.mark.parametrize("vocab", [1, 2, 7])
def test_tiny_vocabularies(vocab: int, device: torch.device) -> None:
    check(random_logits(2, vocab, device), [0, 1], [0, vocab - 1], vocab)


def test_nothing_beside_a_row_is_read(device: torch.device) -> None:
    """Fewer parts of the vocabulary than alternatives, and a signalling NaN, which no addition bears, all around."""
    memory = torch.full((7, 200), 0x7FA00001, dtype=torch.int32, device=device).view(torch.float32)
    logits = memory[2:5, 50:140]
    logits.copy_(random_logits(3, 90, device))
    check(logits, [0, 1, 2], [5, 89, 0], 5)


def test_of_equal_logits_the_lowest_token_comes_first(device: torch.device) -> None:
    logits = random_logits(5, 5000, device).round()
    logits[1] = 0.0
    logits[2, ::2] = -0.0
    logits[2, 1::2] = 0.0
    logits[3] = -torch.inf
    logits[3, [4000, 17, 4500]] = torch.tensor([2.0, 2.0, 3.0], device=device)
    report = check(logits, [0, 1, 2, 3], [9, 8, 7, 17], 3)
    assert report[1, 1:5].tolist() == report[2, 1:5].tolist() == [0, 0, 1, 2]
    assert report[3, 1:5].tolist() == [1, 4500, 17, 4000]


def test_edited_rows_are_scored_by_what_they_were(device: torch.device) -> None:
    """By their raw logits; `logits` holds rows of lanes without edits."""
    raw, logits = random_logits(4, 300, device, seed=1), random_logits(4, 300, device, seed=2)
    lanes, edits = ints([2, 0, 1, 0], device), ints([0, 3, 1], device)
    report = check(logits, [0, 1, 2, 3], [1, 2, 3, 4], 2, raw=raw, edits=edits, lanes=lanes)
    truth = torch.stack([raw[0], logits[1], raw[2], logits[3]])
    assert report[:, 2].tolist() == truth.argmax(-1).tolist()


def test_neighbours_do_not_matter(device: torch.device) -> None:
    """The bits of a row are the same alone, and in any other row of another batch."""
    logits = random_logits(6, 9001, device)
    together = check(logits, [0, 1, 2, 3, 4, 5], [7] * 6, 5)
    moved = check(logits[[3, 2]].clone(), [1, 0], [7, 7], 5)
    assert torch.equal(together[2:4], moved)


def test_new_tokens_of_seats(device: torch.device) -> None:
    """The lane of the second seat does not ask for scores."""
    reports = [2, 3, 11, 12, 13, 0, 11, 12, 14, 40, 0, 0, 19, *[0] * 7, 0, 0, 21, 0, 0, 0, 0, 0, 0, 30]
    outcomes, starts = ints(reports, device).view(3, 10), ints([0, 4, 5, 6], device)
    lanes, scored = ints([2, 1, 0], device), ints([1, 0, 1], device)
    results = []
    for pairs in (score.score_pairs, score_reference.score_pairs):
        rows, tokens = (torch.full((3, 4), -7, dtype=torch.int32, device=device) for _ in range(2))
        pairs(outcomes, lanes=lanes, scored=scored, row_starts=starts, rows=rows, tokens=tokens, pdl=ON_GPU)
        results.append((rows.tolist(), tokens.tolist()))
    expected = [[0, 1, 2, -1], [-1] * 4, [5, -1, -1, -1]], [[11, 12, 13, 0], [0] * 4, [21, 0, 0, 0]]
    assert results[0] == results[1] == expected


def test_new_tokens_of_trees(device: torch.device) -> None:
    """Rows follow the accepted nodes."""
    first = [2, 3, 11, 12, 13, 0, 11, 15, 12, 40, 0, 2, 0, -1, 0, 0]  # … │ new length │ path │ parents
    second = [0, 0, 21, 0, 0, 0, 0, 0, 0, 30, 0, 0, 0, 0, 0, 0]
    outcomes = ints([*first, *second], device).view(2, 16)
    starts, lanes, scored = ints([0, 4, 5], device), ints([1, 0], device), ints([1, 1], device)
    results = []
    for pairs in (score.score_pairs, score_reference.score_pairs):
        rows, tokens = (torch.full((2, 4), -7, dtype=torch.int32, device=device) for _ in range(2))
        pairs(outcomes, lanes=lanes, scored=scored, row_starts=starts, rows=rows, tokens=tokens, tree=True, pdl=ON_GPU)
        results.append((rows.tolist(), tokens.tolist()))
    assert results[0] == results[1] == ([[0, 1, 3, -1], [4, -1, -1, -1]], [[11, 12, 13, 0], [21, 0, 0, 0]])
