"""Checks of the acceptance rules that take the code to be checked, so that mutants can be put to them as well."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch

from paceline.draft import Draft
from paceline.rules import BUILT_IN
from tests.accept import by_hand


class Code(Protocol):
    """The parts of paceline.accept, original or mutated."""

    Rows: Any
    Outcome: Any
    walk: Any
    accept_coupled: Any
    accept_rejection: Any
    accept_block: Any
    accept_likely: Any
    problem_of: Any
    in_use: Any


RULES = {"accept_rejection": by_hand.rejection, "accept_block": by_hand.block}  # those that need distributions


def check_coupled(code: Code, *, rounds: int = 80) -> None:
    """Random chains and trees, of a vocabulary so small that paths get long."""
    random = np.random.default_rng(0)
    for turn in range(rounds):
        vocab = 2 + turn % 3
        make = by_hand.random_tree if turn % 2 else by_hand.random_chain
        draft = make(random, int(random.integers(0, 7)), vocab)
        drawn = random.integers(vocab, size=1 + len(draft)).tolist()
        verdict = code.accept_coupled(draft, drawn)
        assert (list(verdict.path), verdict.token) == by_hand.coupled(draft, drawn)


def check_with_distributions(code: Code, *, rounds: int = 40) -> None:
    random = np.random.default_rng(1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(rounds):
        drafts = [by_hand.random_chain(random, int(random.integers(1, 5)), 4) for _ in range(3)]
        rows = sum(1 + len(draft) for draft in drafts)
        p, q = (torch.rand((rows, 4), generator=generator).softmax(-1) for _ in range(2))
        coins = torch.rand(rows, generator=generator, dtype=torch.float64)
        noise = -torch.rand((3, 4), generator=generator).log().neg().log()
        compare(code, drafts, p, q, coins, noise)


def compare(
    code: Code, drafts: list[Draft], p: torch.Tensor, q: torch.Tensor, coins: torch.Tensor, noise: torch.Tensor
) -> None:
    layout = by_hand.lay_out(drafts)
    for rule, by in RULES.items():
        outcome = getattr(code, rule)(code.Rows(**layout.tensors(), depth=layout.depth), p, q, coins, noise)
        paths, row = by_hand.split(outcome.alive, drafts), 0
        for i, draft in enumerate(drafts):
            after, drafted = slice(row, row + 1 + len(draft)), slice(row + 1, row + 1 + len(draft))
            path, token = by(draft.tokens, p[after], q[drafted], coins[drafted], noise[i])
            assert paths[i] == path
            assert int(outcome.tokens[i]) == token
            assert int(outcome.last[i]) == row + len(path)
            row += 1 + len(draft)


def check_distributions_at_the_edges(code: Code) -> None:
    """A coin exactly on the border, a residual of nothing, an impossible token, a draft accepted to its end."""
    drafts = [Draft(tokens=(0,)), Draft(tokens=(1, 0))]
    coins = torch.tensor([0.1, 0.5, 0.1, 0.9, 0.9], dtype=torch.float64)
    noise = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    half = torch.full((5, 2), 0.5)
    cases = {
        "a coin on the border": (torch.tensor([[0.25, 0.75]] * 5), torch.tensor([[0.5, 0.5]] * 5)),
        "nothing left of the residual": (torch.tensor([[0.25, 0.5]] * 5), torch.tensor([[0.75, 0.5]] * 5)),
        "an impossible token": (torch.tensor([[0.0, 1.0]] * 5), half),
        "all accepted": (torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.1, 0.9], [0.9, 0.1], [0.1, 0.9]]), 0.1 * half),
    }
    for p, q in cases.values():
        compare(code, drafts, p, q, coins, noise)


def check_likely(code: Code, *, rounds: int = 60) -> None:
    """Random chains and trees; probabilities and floors of few values, so that some are equal."""
    random = np.random.default_rng(2)
    for turn in range(rounds):
        make = by_hand.random_tree if turn % 3 else by_hand.random_chain
        drafts = [make(random, int(random.integers(1, 7)), 4) for _ in range(int(random.integers(1, 4)))]
        layout = by_hand.lay_out(drafts)
        targets = torch.from_numpy(random.integers(4, size=len(layout.tokens)))
        p = torch.from_numpy(random.integers(5, size=(len(layout.tokens), 4)) / 8)
        floors = torch.from_numpy(random.integers(1, 5, size=len(layout.tokens)) / 8)
        outcome = code.accept_likely(code.Rows(**layout.tensors(), depth=layout.depth), targets, p, floors)
        paths, row = by_hand.split(outcome.alive, drafts), 0
        for i, draft in enumerate(drafts):
            own = slice(row, row + 1 + len(draft))
            path, token = by_hand.likely(draft, targets[own].tolist(), p[own], floors[own].tolist())
            assert paths[i] == path
            assert int(outcome.tokens[i]) == token
            assert int(outcome.last[i]) == (row + 1 + path[-1] if path else row)
            row += 1 + len(draft)


def check_outcomes(code: Code) -> None:
    """An outcome that can be committed is let through, and no other one is. Two drafts: a tree, and a chain of one."""
    layout = by_hand.lay_out([Draft(tokens=(1, 2, 3), parents=(-1, -1, 0)), Draft(tokens=(0,))])
    given = SimpleNamespace(rows=code.Rows(**layout.tensors(), depth=layout.depth), vocab_size=4)

    def problem(alive: list[Any], tokens: list[Any], **types: Any) -> str | None:
        made = torch.tensor(alive, **types), torch.tensor([0, 4]), torch.tensor(tokens)
        said: str | None = code.problem_of(code.Outcome(*made), given)
        return said

    nothing, all_of_it = [True, False, False, False, True, False], [True, True, False, True, True, True]
    assert problem(nothing, [0, 3]) is None
    assert problem(all_of_it, [3, 0]) is None
    for tokens in ([0, 4], [-1, 0], [0], [0.0, 1.0]):
        assert "Outcome.tokens" in (problem(nothing, tokens) or "")
    assert "Outcome.alive" in (problem(nothing[:-1], [0, 0]) or "")
    assert "Outcome.alive" in (problem(nothing, [0, 0], dtype=torch.int64) or "")
    for alive in (
        [False, False, False, False, True, False],  # no root
        [True, False, False, True, True, False],  # a row whose parent is dead
        [True, True, True, False, True, False],  # two children of one row
    ):
        assert "one path" in (problem(alive, [0, 0]) or "")
    assert "no Outcome" in (code.problem_of(None, given) or "")


def check_rules_in_use(code: Code) -> None:
    """A rule that works judges by itself."""
    for rule in BUILT_IN:
        assert code.in_use(rule) is rule


CHECKS = (
    check_coupled,
    check_with_distributions,
    check_distributions_at_the_edges,
    check_likely,
    check_outcomes,
    check_rules_in_use,
)
