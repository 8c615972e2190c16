"""Lookahead: a window of guesses as branches of the draft, a pool of n-grams, and what moves them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from paceline.draft import Draft
from paceline.drafters import registry
from paceline.drafters.base import Ask, Verified
from paceline.drafters.lookahead import LookaheadDrafter, tree_of
from paceline.errors import InvalidRequest, UnknownOption
from paceline.sampling.sampler import Sampler
from paceline.types import SamplingParams

VOCAB = 100
SAMPLER = Sampler(SamplingParams(temperature=0), seed=0, vocab_size=VOCAB, eos_ids=())
Model = Callable[[Sequence[int]], int]  # text → its next token


def ask(tokens: Sequence[int], *, max_draft: int = 64, key: int = 1) -> Ask:
    return Ask(key, 0, np.array(tokens, dtype=np.int32), max_draft, SAMPLER)


def verified(text: Sequence[int], draft: Draft, model: Model) -> Verified:
    best = [model([*text, *path]) for path in ((), *draft.paths)]
    logits = torch.nn.functional.one_hot(torch.tensor(best), VOCAB).float()
    return Verified(1, "", text[-1], draft, logits, best)


def step(drafter: LookaheadDrafter, text: list[int], model: Model, *, max_draft: int = 64) -> tuple[Draft, int]:
    """Draft, verify, accept, commit and hear, as a step does. Return the draft and the number of accepted tokens."""
    [draft] = drafter.propose([ask(text, max_draft=max_draft)])
    assert draft.problem(vocab_size=VOCAB, max_length=max_draft) is None
    said, paths, accepted = verified(text, draft, model), {(): 0}, 0
    paths |= {path: row + 1 for row, path in enumerate(draft.paths)}
    path: tuple[int, ...] = ()
    while (*path, said.best[paths[path]]) in paths:
        path, accepted = (*path, said.best[paths[path]]), accepted + 1
    text += [*path, said.best[paths[path]]]
    drafter.hear([said])
    return draft, accepted


def counting(text: Sequence[int]) -> int:
    """Every token is followed by the next number."""
    return (text[-1] + 1) % VOCAB


def test_a_tree_of_paths() -> None:
    assert tree_of([(1, 2), (1, 3), (4,)], limit=9) == Draft((1, 2, 3, 4), (-1, 0, 0, -1), passes=0)
    assert tree_of([(1, 2), (3, 4, 5), (1, 3)], limit=3) == Draft((1, 2, 3), (-1, 0, 0), passes=0), "as a whole or not"
    assert tree_of([(), (1,)], limit=1) == Draft((1,), (-1,), passes=0)
    assert not tree_of([], limit=4).tokens


def test_the_first_draft_is_a_window_of_the_text_s_own_tokens() -> None:
    drafter = LookaheadDrafter(window=3, ngram=3, pool=2)
    text = [*range(10, 40)]
    [draft] = drafter.propose([ask(text)])
    state = drafter._states[1]
    [first, second] = state.levels
    assert {*first, *second} <= {*text}
    assert {*draft.paths} >= {(second[0],), (first[1], second[1]), (first[1], first[2], second[2])}
    assert len(draft) <= 5 < drafter.max_draft == 2 + 3 + 4


def test_columns_become_n_grams_and_levels_move_up() -> None:
    drafter = LookaheadDrafter(window=2, ngram=3, pool=2)
    drafter.propose([ask([5])])
    state = drafter._states[1]
    state.levels, state.length = [[0, 20], [30, 40]], 1
    [draft] = drafter.propose([ask([5])])
    assert draft.paths == [(30,), (20,), (20, 40)]
    drafter.hear([verified([5], draft, lambda text: 50 + len(text))])
    assert {first: [*rests] for first, rests in state.pool.items()} == {5: [(30, 52)], 20: [(40, 53)]}
    assert state.levels == [[30, 40], [52, 53]]
    assert state.length == 2


def test_the_window_slides_over_what_was_accepted() -> None:
    drafter = LookaheadDrafter(window=3, ngram=2, pool=1)
    drafter.propose([ask([1, 2])])
    drafter._states[1].levels = [[10, 11, 12]]
    drafter.propose([ask([1, 2, 3, 4])])
    assert drafter._states[1].levels[0][0] == 12
    assert {*drafter._states[1].levels[0][1:]} <= {1, 2, 3, 4}
    drafter.propose([ask([*range(1, 60)])])  # many plain steps
    assert 12 not in drafter._states[1].levels[0]
    assert len(drafter._states[1].levels[0]) == 3


def test_a_pool_keeps_the_latest_n_grams_of_a_token_and_drafts_them_first() -> None:
    drafter = LookaheadDrafter(window=2, ngram=3, pool=2)
    drafter.propose([ask([5])])
    state = drafter._states[1]
    for rest in ((1, 1), (2, 2), (1, 1), (3, 3)):
        drafter._keep(state, 5, rest)
    assert [*state.pool[5]] == [(1, 1), (3, 3)]
    [draft] = drafter.propose([ask([5], max_draft=4)])
    assert draft.tokens == (3, 3, 1, 1)
    assert draft.parents == (-1, 0, -1, 2)


@pytest.mark.parametrize(("window", "ngram", "pool"), [(4, 3, 3), (5, 4, 2), (3, 2, 1), (2, 3, 1)])
def test_guesses_are_accepted_once_they_have_settled(window: int, ngram: int, pool: int) -> None:
    """The text is a cycle of 20: n-grams come from guesses alone, and are right the next time."""
    drafter, text = LookaheadDrafter(window=window, ngram=ngram, pool=pool), [3, 1, 4]

    def cycle(text: Sequence[int]) -> int:
        return (text[-1] + 1) % 20

    accepted = [step(drafter, text, cycle)[1] for _ in range(60)]
    assert text[3:] == [(5 + i) % 20 for i in range(len(text) - 3)]
    assert max(accepted) >= ngram - 1
    assert sum(accepted[-20:]) >= 10


def test_little_room_costs_the_window_first() -> None:
    drafter, text = LookaheadDrafter(), [3, 1, 4]
    for _ in range(5):
        draft, _ = step(drafter, text, counting, max_draft=2)
        assert 1 <= len(draft) <= 2
    assert text[:6] == [3, 1, 4, 5, 6, 7]


def test_drafts_of_others_move_nothing() -> None:
    drafter = LookaheadDrafter()
    drafter.propose([ask([1, 2, 3])])
    state = drafter._states[1]
    before = [[*level] for level in state.levels], state.length
    drafter.hear([verified([1, 2, 3], Draft(tokens=(99, 98)), counting)])
    drafter.hear([verified([1, 2, 3], Draft(), counting)])
    drafter.hear([verified([1, 2, 3], Draft(tokens=(99,)), counting)._replace(key=7)])
    assert (state.levels, state.length) == before
    assert not state.pool
    drafter.stop(1)
    drafter.stop(1)
    assert not drafter._states


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ("lookahead:window=0", InvalidRequest, "lookahead: window must be 2 to 32, not 0"),
        ("lookahead:window=33", InvalidRequest, "window must be 2 to 32, not 33"),
        ("lookahead:ngram=1", InvalidRequest, "ngram must be 2 to 8, not 1"),
        ("lookahead:pool=0", InvalidRequest, "pool must be 1 to 32, not 0"),
        ("lookahead:window=32,ngram=8", InvalidRequest, "draft 244 tokens, and 64 are the most: take less of one"),
        ("lookahead:window=x", InvalidRequest, "lookahead:window must be a whole number, not 'x'"),
        ("lookahead:gram=3", UnknownOption, "unknown option of the lookahead drafter 'gram'; did you mean 'ngram'"),
    ],
)
def test_bad_options(words: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        registry.recipe(words, None)  # type: ignore[arg-type]


def test_options() -> None:
    context: Any = None
    made = registry.recipe("lookahead:window=3,ngram=4,pool=2", context).build(context)
    assert made is not None
    assert made.max_draft == 2 + 6 + 6
