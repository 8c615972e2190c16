from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.draft import EMPTY, Draft

VOCAB = 10


def uniform(length: int) -> torch.Tensor:
    return torch.full((length, VOCAB), 1 / VOCAB)


@pytest.mark.parametrize(
    "draft",
    [
        EMPTY,
        Draft(tokens=(0, 9)),
        Draft(tokens=(3, 3), parents=(-1, 0)),
        Draft(tokens=(3, 4, 3, 3), parents=(-1, -1, 0, 1)),
        Draft(tokens=(1, 2), probs=uniform(2)),
        Draft(tokens=(1, 2), parents=(-1, 0), probs=uniform(2).double()),
        Draft(probs=uniform(0)),
    ],
)
def test_sound_drafts(draft: Draft) -> None:
    assert draft.problem(vocab_size=VOCAB, max_length=4) is None


@pytest.mark.parametrize(
    ("draft", "problem"),
    [
        (Draft(tokens=(1,) * 5), "5 tokens where at most 4 were asked for"),
        (Draft(tokens=(10,)), "outside of the vocabulary of 10"),
        (Draft(tokens=(-1,)), "outside of the vocabulary"),
        (Draft(tokens=(True,)), "outside of the vocabulary"),
        (Draft(tokens=[1]), "not a tuple"),
        (Draft(tokens=(1,), parents=[-1]), "not a tuple"),
        (Draft(tokens=(1, 2), parents=(-1,)), "1 parents for 2 tokens"),
        (Draft(tokens=(1, 2), parents=(-1, 1)), "does not stand before its child"),
        (Draft(tokens=(1, 2), parents=(-2, 0)), "does not stand before its child"),
        (Draft(tokens=(1, 1), parents=(-1, -1)), "two siblings with the same token"),
        (Draft(tokens=(1,), probs=uniform(2)), "probabilities of shape (2, 10)"),
        (Draft(tokens=(1,), probs=torch.ones(1, VOCAB)), "do not add up to 1"),
        (Draft(tokens=(1,), probs=uniform(1) * torch.nan), "do not add up to 1"),
        (Draft(tokens=(1,), probs=torch.eye(VOCAB, dtype=torch.int64)[1:2]), "probabilities of type torch.int64"),
        (Draft(tokens=(1,), probs=torch.eye(VOCAB)[:1]), "its own probabilities exclude"),
        (Draft(tokens=(1, 2), parents=(-1, -1), probs=uniform(2)), "probabilities for a tree"),
        (Draft(tokens=(1,), passes=-1), "passes -1 that are no count"),
        (Draft(tokens=(1,), passes="two"), "passes 'two' that are no count"),
    ],
)
def test_problems(draft: Draft, problem: str) -> None:
    said = draft.problem(vocab_size=VOCAB, max_length=4)
    assert said is not None
    assert problem in said


@pytest.mark.parametrize(
    ("parents", "chain"), [((), True), ((-1, 0, 1), True), ((-1, 0, 0), False), ((-1, -1, 0), False)]
)
def test_chains(parents: Any, chain: bool) -> None:
    assert Draft(tokens=(1, 2, 3), parents=parents).is_chain is chain


def test_length_is_truth() -> None:
    assert not EMPTY
    assert len(Draft(tokens=(0,))) == 1


def test_confidence_in_a_token_alone() -> None:
    tree = Draft((1, 2, 3, 4), parents=(-1, -1, 0, 2), confidence=(0.5, 0.25, 0.25, 0.0))
    assert tree.own_confidence == [0.5, 0.25, 0.5, 0.0]
    assert Draft((1, 2), confidence=(0.0, 0.0)).own_confidence == [0.0, 0.0]
    assert Draft((1, 0), probs=torch.tensor([[0.25, 0.75], [0.5, 0.5]])).own_confidence == [0.75, 0.5]
    assert Draft((1,)).own_confidence == []


@pytest.mark.parametrize("confidence", [(0.5,), (0.5, 1.1), (0.5, float("nan"))])
def test_bad_confidence(confidence: tuple[float, ...]) -> None:
    assert "confidence" in (Draft((1, 2), confidence=confidence).problem(vocab_size=4, max_length=4) or "")
