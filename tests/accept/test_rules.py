"""The acceptance rules against what one would do by hand, one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from paceline.accept.block import accept_block
from paceline.accept.coupled import accept_coupled
from paceline.accept.lossy import NEUTRAL, accept_likely, accept_needed, needed_by_confidence, typical_floors
from paceline.accept.outside import problem_of
from paceline.accept.registry import in_use
from paceline.accept.rejection import accept_rejection
from paceline.accept.rows import Outcome, Rows, walk
from paceline.draft import Draft
from tests.accept import by_hand
from tests.accept.checks import CHECKS, Code

CODE = SimpleNamespace(
    Rows=Rows,
    Outcome=Outcome,
    walk=walk,
    accept_coupled=accept_coupled,
    accept_rejection=accept_rejection,
    accept_block=accept_block,
    accept_likely=accept_likely,
    problem_of=problem_of,
    in_use=in_use,
)


@pytest.mark.parametrize("check", CHECKS)
def test_as_by_hand(check: Callable[[Code], None]) -> None:
    check(CODE)


@hypothesis.given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.floats(0.5, 1))
@hypothesis.settings(max_examples=60, deadline=None)
def test_a_row_is_alive_if_it_and_all_above_it_are_right(seed: int, length: int, share: float) -> None:
    """Of any depth, also where the right rows are no path."""
    random = np.random.default_rng(seed)
    layout = by_hand.lay_out([by_hand.random_chain(random, length, 3)])
    right = torch.from_numpy(random.random(length + 1) < share)
    alive, last = walk(Rows(**layout.tensors(), depth=layout.depth), right)
    expected = [True]
    for row in range(1, length + 1):
        expected.append(expected[layout.parents[row]] and bool(right[row]))
    assert alive.tolist() == expected
    assert last.tolist() == [sum(expected) - 1]


@pytest.mark.parametrize("rule", [accept_rejection, accept_block])
def test_probabilities_decide_with_the_coin(rule: Callable[..., Outcome]) -> None:
    """p/q = 1/2: a coin below it accepts, one above it rejects and takes the token that p has more of."""
    rows = Rows(**by_hand.lay_out([Draft(tokens=(0,))]).tensors(), depth=1)
    p, q = torch.tensor([[0.4, 0.6], [0.5, 0.5]]), torch.tensor([[0.0, 0.0], [0.8, 0.2]])
    noise = torch.zeros(1, 2)
    accepted = rule(rows, p, q, torch.tensor([0.0, 0.49]), noise)
    rejected = rule(rows, p, q, torch.tensor([0.0, 0.51]), noise)
    assert accepted.alive.tolist() == [True, True]
    assert rejected.alive.tolist() == [True, False]
    assert rejected.tokens.tolist() == [1]


def test_a_good_token_saves_a_bad_one_before_it() -> None:
    """p/q is 1/2 and then 2: one by one half of all drafts would end at the first token, as a block none does."""
    rows = Rows(**by_hand.lay_out([Draft(tokens=(0, 1))]).tensors(), depth=2)
    p = torch.tensor([[0.4, 0.6], [0.2, 0.8], [0.5, 0.5]])
    q = torch.tensor([[0.0, 0.0], [0.8, 0.2], [0.6, 0.4]])
    coins, noise = torch.full((3,), 0.99, dtype=torch.float64), torch.zeros(1, 2)
    assert accept_block(rows, p, q, coins, noise).alive.tolist() == [True, True, True]
    assert accept_rejection(rows, p, q, coins, noise).alive.tolist() == [True, False, False]


def test_in_doubt_less_will_do() -> None:
    """A target that is sure asks for ε at most, one that cannot tell 16 tokens apart for √ε / 16."""
    sure, doubtful = torch.tensor([1.0] + [0.0] * 15), torch.full((16,), 1 / 16)
    floors = typical_floors(torch.stack((sure, doubtful)), torch.tensor([0.09, 0.09]))
    assert floors.tolist() == pytest.approx([0.09, 0.3 / 16])


def test_less_will_do_where_the_drafter_is_sure() -> None:
    """Nothing but the target's own token where it is not, and the threshold where it does not say."""
    needed = needed_by_confidence(torch.tensor([0.0, NEUTRAL, 1.0]), torch.tensor([0.3, 0.3, 0.3]))
    assert needed.tolist() == pytest.approx([1.0, 0.3, 0.09])


def test_the_likeliest_of_the_siblings_that_will_do() -> None:
    """Token 1 is likelier, and needs more than it has; token 2 has what it needs."""
    rows = Rows(**by_hand.lay_out([Draft(tokens=(1, 2), parents=(-1, -1))]).tensors(), depth=1)
    p, targets = torch.tensor([[0.4, 0.35, 0.25]] * 3), torch.zeros(3, dtype=torch.int64)
    outcome = accept_needed(rows, targets, p, torch.tensor([1.0, 0.5, 0.2]))
    assert outcome.alive.tolist() == [True, False, True]
