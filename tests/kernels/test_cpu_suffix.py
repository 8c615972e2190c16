"""Suffix automata against counting by hand, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from paceline.kernels.cpu.abi import SUFFIX_DEPTH, SUFFIX_NODES_MAX
from paceline.kernels.cpu.build import load_library
from paceline.kernels.cpu.suffix import Drafted, SuffixAutomaton, SuffixDrafting

CONTEXTS, OWN_ESCAPE, SHARED_ESCAPE = 4, 2.0, 6.0  # as in suffix_draft.c
Texts = Sequence[Sequence[int]]


def automaton(texts: Texts, *, open_end: bool = False) -> SuffixAutomaton:
    made = SuffixAutomaton(load_library())
    for number, text in enumerate(texts):
        made.extend(np.array(text, dtype=np.int32))
        if not open_end or number < len(texts) - 1:
            made.end_text()
    return made


def draft(
    own: Sequence[int],
    *shared: Texts,
    longest: int = 8,
    width: int = 3,
    prices: Sequence[float] = (0.0,),
    trust: float = 1.0,
    min_confidence: float = 0.001,
) -> Drafted:
    drafting, text = SuffixDrafting(load_library(), width=width), np.array(own, dtype=np.int32)
    sources = [automaton([own], open_end=True), *map(automaton, shared)]
    limits = {"trust": trust, "min_confidence": min_confidence}
    return drafting.draft(sources, text, unread=0, longest=longest, prices=prices, **limits)


def places(texts: Texts, string: Sequence[int]) -> list[tuple[int, int]]:
    """Where a string ends in texts: text and index of the token after it."""
    size = len(string)
    return [
        (number, end)
        for number, text in enumerate(texts)
        for end in range(size, len(text) + 1)
        if list(text[end - size : end]) == list(string)
    ]


def contexts(texts: Texts, recent: Sequence[int], escape: float) -> list[tuple[int, float, list[int]]]:
    """The longest contexts with different places: their lengths, escapes, and the tokens that followed them."""
    found: list[tuple[int, float, list[int]]] = []
    known: list[tuple[int, int]] = []
    for size in range(min(len(recent), SUFFIX_DEPTH), 0, -1):
        ends = places(texts, recent[len(recent) - size :])
        following = [texts[number][end] for number, end in ends if end < len(texts[number])]
        if ends != known and following and len(found) < CONTEXTS:
            found.append((size, escape / size, following))
        known = ends
    return found


def probability(token: int, own: Sequence[int], shared: Sequence[Texts], path: Sequence[int]) -> float:
    """Blend the shares of a token after all contexts, from short to long."""
    recent = [*own, *path]
    found = [(own_first, each) for own_first, each in ((1, c) for c in contexts([own], recent, OWN_ESCAPE))]
    for texts in shared:
        found += [(0, each) for each in contexts(texts, recent, SHARED_ESCAPE)]
    p = 0.0
    for _, (_, escape, following) in sorted(found, key=lambda each: (each[1][0], each[0])):
        p = (following.count(token) + escape * p) / (len(following) + escape)
    return p


SMALL = st.lists(st.integers(0, 2), min_size=1, max_size=30)


@hypothesis.given(SMALL, st.lists(SMALL, max_size=4))
@hypothesis.settings(max_examples=150, deadline=None)
def test_as_by_hand(own: list[int], past: list[list[int]]) -> None:
    """With three tokens every one is a candidate: drafts have the probabilities that counting gives, all of them."""
    shared = [past] if past else []
    made = draft(own, *shared, longest=12)
    paths: list[list[int]] = []
    for token, parent in zip(made.tokens, made.parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    for path, parent, confidence in zip(paths, made.parents, made.confidence, strict=True):
        before = made.confidence[parent] if parent >= 0 else 1.0
        assert confidence == pytest.approx(before * probability(path[-1], own, shared, path[:-1]), rel=1e-4)
    first = max(probability(token, own, shared, []) for token in range(3))
    assert (made.confidence[0] if made.tokens else 0.0) == pytest.approx(first, rel=1e-4)
    assert list(made.confidence) == sorted(made.confidence, reverse=True)


def test_long_contexts_are_counted_to_their_depth() -> None:
    """A context of the greatest depth is followed by what followed it, though a shorter one was followed by another."""
    passage = list(range(100, 100 + SUFFIX_DEPTH))
    own = [1, *passage, 7, 2, *passage[1:], 8, 3, *passage[1:], 8, 1, *passage]
    made = draft(own, longest=1, width=1)
    assert made.tokens == (7,)
    assert made.confidence[0] == pytest.approx(probability(7, own, [], []), rel=1e-4)


@hypothesis.given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.lists(st.integers(1, 9), max_size=8))
@hypothesis.settings(max_examples=50, deadline=None)
def test_it_does_not_matter_in_which_pieces_tokens_come(text: list[int], pieces: list[int]) -> None:
    whole, grown, start = automaton([text], open_end=True), SuffixAutomaton(load_library()), 0
    for piece in [*pieces, len(text)]:
        grown.extend(np.array(text[start : start + piece], dtype=np.int32))
        start += piece
    drafting, tokens = SuffixDrafting(load_library(), width=2), np.array(text, dtype=np.int32)
    limits = {"longest": 9, "prices": (0.0,), "trust": 0.9, "min_confidence": 0.01}
    assert drafting.draft([whole], tokens, unread=0, **limits) == drafting.draft([grown], tokens, unread=0, **limits)
    fresh = SuffixAutomaton(load_library())
    assert drafting.draft([fresh], tokens, unread=len(text), **limits) == drafting.draft(
        [whole], tokens, unread=0, **limits
    )


def test_the_more_frequent_token_comes_first() -> None:
    made = draft([5, 1, 9, 5, 1, 9, 5, 2, 9, 5], longest=4)
    roots = [token for token, parent in zip(made.tokens, made.parents, strict=True) if parent == -1]
    assert roots == [1, 2]


def test_the_latest_of_equals_is_known() -> None:
    """Of more than three equally frequent tokens the latest is a candidate."""
    made = draft([5, 1, 5, 2, 5, 3, 5, 4, 5, 6, 5], longest=8, width=8)
    assert {token for token, parent in zip(made.tokens, made.parents, strict=True) if parent == -1} == {3, 4, 6}


def test_a_draft_ends_where_it_no_longer_pays() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1]
    sizes = [len(draft(text, prices=[price]).tokens) for price in (0.0, 0.1, 0.2, 0.3, 0.9)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 8
    assert sizes[-1] == 0
    assert len(draft(text, prices=[0.0, 0.0, 1.0]).tokens) == 2
    assert len(draft(text, min_confidence=draft(text).confidence[3]).tokens) == 4


def test_a_dear_first_token_is_drafted_where_later_ones_make_up_for_it() -> None:
    text = [*range(1, 9), 0, *range(1, 9), 0, *range(1, 9), 0, 1, 2]
    first = draft(text, longest=1).confidence[0]
    assert not draft(text, longest=1, prices=[first + 0.1]).tokens
    assert len(draft(text, longest=4, prices=[first + 0.1, 0.1]).tokens) == 4


def test_trust_scales_every_token() -> None:
    full, half = draft([1, 2, 3, 1], longest=2), draft([1, 2, 3, 1], longest=2, trust=0.5)
    assert half.confidence == pytest.approx([full.confidence[0] / 2, full.confidence[1] / 4])


def test_limits_of_a_draft() -> None:
    text = [1, 2] * 40
    assert len(draft(text, longest=1000, width=1).tokens) == SUFFIX_NODES_MAX
    assert draft(text, longest=3, width=1).parents == (-1, 0, 1)
    assert draft([1, 2, 3], longest=3).tokens == ()
    assert draft([1], longest=3).tokens == ()


def test_memory_grows_with_new_text_alone() -> None:
    text = np.random.default_rng(0).integers(0, 50, 20_000).astype(np.int32)
    made = automaton([text])
    assert made.bytes < 250 * len(text)  # bytes per token, with room to grow
    before = made.bytes
    for _ in range(3):
        made.extend(text)
        made.end_text()
    assert made.bytes == before
    looping = automaton([[7] * 50_000])
    assert looping.bytes < 250 * 50_000
