from __future__ import annotations

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from paceline.drafters.base import Ask
from paceline.drafters.ngram import NgramDrafter
from paceline.errors import InvalidRequest
from paceline.sampling.sampler import Sampler
from paceline.types import SamplingParams

SAMPLER = Sampler(SamplingParams(), seed=0, vocab_size=10, eos_ids=())


def ask(tokens: list[int], *, key: int = 0, longest: int = 6) -> Ask:
    return Ask(key=key, lane=0, tokens=np.array(tokens, dtype=np.int32), max_draft=longest, sampler=SAMPLER)


def by_hand(tokens: list[int], *, sizes: tuple[int, int], longest: int) -> list[int]:
    """What followed the latest earlier occurrence of the longest suffix that has one, over and over if it is short."""
    for size in range(sizes[1], sizes[0] - 1, -1):
        ending = tokens[-size:]
        for end in range(len(tokens) - 1, size - 1, -1):
            if len(ending) == size and tokens[end - size : end] == ending:
                following = tokens[end:]
                return [following[i % len(following)] for i in range(longest)]
    return []


@hypothesis.given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.lists(st.integers(1, 7), max_size=8),
    st.sampled_from([(1, 1), (1, 3), (2, 4), (3, 3)]),
    st.integers(1, 9),
)
@hypothesis.settings(max_examples=150, deadline=None)
def test_as_by_hand(tokens: list[int], pieces: list[int], sizes: tuple[int, int], longest: int) -> None:
    """However the tokens arrive: a prompt and then pieces, some of them without being asked."""
    drafter = NgramDrafter(min_ngram=sizes[0], max_ngram=sizes[1])
    seen = 1
    drafter.start(0, 0, np.array(tokens[:seen], dtype=np.int32))
    for piece in pieces:
        seen = min(seen + piece, len(tokens))
        drafter.observe(0, np.array(tokens[:seen]), 0)
        (draft,) = drafter.propose([ask(tokens[:seen], longest=longest)])
        assert list(draft.tokens) == by_hand(tokens[:seen], sizes=sizes, longest=longest)
        assert draft.problem(vocab_size=3, max_length=longest) is None


def test_prompt_and_output_are_searched() -> None:
    drafter = NgramDrafter(min_ngram=2, max_ngram=3)
    drafter.start(0, 0, np.array([1, 2, 3, 4], dtype=np.int32))
    assert drafter.propose([ask([1, 2, 3, 4, 9, 1, 2])])[0].tokens[:3] == (3, 4, 9)
    assert drafter.propose([ask([1, 2, 3, 4, 9, 1, 2, 7, 1, 2])])[0].tokens[:3] == (7, 1, 2)


def test_sequences_are_kept_apart() -> None:
    drafter = NgramDrafter(min_ngram=1, max_ngram=2)
    for key, tokens in enumerate(([1, 2, 1], [1, 3, 1], [5, 6, 7])):
        drafter.start(key, 0, np.array(tokens, dtype=np.int32))
    asks = [ask([5, 6, 7], key=2), ask([1, 2, 1], key=0), ask([1, 3, 1], key=1)]
    assert [draft.tokens[:1] for draft in drafter.propose(asks)] == [(), (2,), (3,)]
    drafter.stop(0)
    drafter.start(0, 0, np.array([1, 4, 1], dtype=np.int32))
    assert drafter.propose([ask([1, 4, 1])])[0].tokens[0] == 4


@pytest.mark.parametrize(("least", "most"), [(0, 3), (3, 2), (1, 65), (-1, 2)])
def test_bad_sizes(least: int, most: int) -> None:
    with pytest.raises(InvalidRequest, match=f"not {least} and {most}"):
        NgramDrafter(min_ngram=least, max_ngram=most)
