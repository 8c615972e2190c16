"""Masks as words for a device: packed, computed together, left to workers, and compared with what was drawn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from paceline.sampling import grammar as grammar_module
from paceline.sampling.grammar import Grammar, GrammarState
from paceline.sampling.sampler import Sampler
from paceline.sampling.words import has_token, only_token, pack
from paceline.types import Finish, SamplingParams
from tests.sampling.test_grammar import EOS, SIZE, grammars, ids
from tests.text.vocabularies import PERSON


def sampler_of(pattern: str, *, stops: Sequence[int] = (), **params: object) -> Sampler:
    grammar = Grammar.regex(pattern)
    asked = SamplingParams(grammar=grammar, stop_ids=tuple(stops), **params)  # type: ignore[arg-type]
    return Sampler(asked, seed=1, vocab_size=SIZE, eos_ids=(EOS,), grammar=grammars().start(grammar))


def tokens_in(mask: np.ndarray | None) -> set[int]:
    assert mask is not None
    return {token for token in range(SIZE) if has_token(mask, token)}


# ── words ──


@pytest.mark.parametrize("tokens", [(), (0,), (31, 32), (5, 63, 96)])
def test_words_have_the_lowest_bit_first(tokens: tuple[int, ...]) -> None:
    mask = pack(tokens, 97)
    assert mask.dtype == np.uint32
    assert len(mask) == 4
    assert {token for token in range(97) if has_token(mask, token)} == {*tokens}
    assert only_token(mask) == (tokens[0] if len(tokens) == 1 else None)


def test_two_tokens_of_one_word_are_not_one() -> None:
    assert only_token(pack([64, 65], 97)) is None


def test_a_mask_is_what_is_allowed() -> None:
    state = grammars().start(Grammar.json_schema(PERSON))
    for path in ((), ids("{"), ids('{"name": "b')):
        allowed = state.allowed(path)
        assert allowed is not None
        assert tokens_in(state.mask(path)) == set(np.flatnonzero(allowed.numpy()).tolist())


# ── min_tokens ──


def test_stops_are_left_out_before_min_tokens_while_something_else_remains() -> None:
    [a] = ids("a")
    sampler = sampler_of("a{1,3}", min_tokens=9)
    assert tokens_in(sampler.mask(ids("a"))) == {a}
    assert tokens_in(sampler.mask(ids("aaa"))) == {EOS}
    sampler.advance(ids("a"))
    assert tokens_in(sampler.mask()) == {a}
    assert tokens_in(sampler_of("a{1,3}").mask(ids("a"))) == {a, EOS}


# ── workers ──


def beside(pattern: str) -> GrammarState:
    state = grammars().start(Grammar.regex(pattern))
    state.beside = True
    return state


def test_a_mask_that_may_take_long_is_left_to_a_worker() -> None:
    state = beside("ab[cd]")
    assert state.looked  # the first mask comes with the compiled grammar
    assert state.slow
    assert state.fits(ids("a")) == (1, None)
    state.advance(ids("a"))
    assert not state.looked
    assert state.mask() is not None
    assert state.looked


def test_a_complete_text_needs_no_mask() -> None:
    state = beside("ab")
    assert state.fits(ids("ab")) == (2, Finish.STOP)
    assert state.fits(ids("ax")) == (1, Finish.ERROR)


def test_the_mask_behind_the_last_token_is_left_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    state = beside("ab[cd]+")
    monkeypatch.setattr(grammar_module, "MAX_INLINE_SECONDS", 1e9)
    state.mask(ids("a"))
    assert not state.slow
    assert state.fits(ids("ab")) == (2, None)
    state.advance(ids("ab"))
    assert not state.looked
    monkeypatch.setattr(grammar_module, "MAX_INLINE_SECONDS", 0.0)
    assert state.slow


def beginnings(text: str) -> list[tuple[int, ...]]:
    tokens = ids(text)
    return [tuple(tokens[:count]) for count in range(len(tokens) + 1)]


@pytest.mark.parametrize(
    ("kind", "before", "paths", "fitting"),
    [
        (Grammar.json_schema(PERSON), "", beginnings('{"name": "b'), None),
        (Grammar.json_schema(PERSON), "{", beginnings('"name": "b'), None),
        (Grammar.regex("[a-z]+"), "", [(), *beginnings("ab")[1:], *beginnings("ac")[2:], *beginnings("b")[1:]], None),
        (Grammar.json_schema(PERSON), "", beginnings("x"), 1),
        (Grammar.regex("a[bc]*"), "ab", beginnings("bbx"), 3),
    ],
)
def test_masks_along_paths_are_those_of_each_alone(
    kind: Grammar, before: str, paths: list[tuple[int, ...]], fitting: int | None
) -> None:
    """Of chains and trees, with drafts that do not fit; the matcher is then where it was."""
    state, alone = grammars().start(kind), grammars().start(kind)
    for each in (state, alone):
        each.advance(ids(before))
    state.look(paths)
    known = [path for path in paths if state.known(path) is not None]
    assert len(known) == (len(paths) if fitting is None else fitting)
    for path in known:
        assert tokens_in(state.known(path)) == tokens_in(alone.mask(path))
    assert state.fits(paths[1])[0] == alone.fits(paths[1])[0]


def test_an_end_that_is_no_token_is_in_no_mask() -> None:
    compiled = grammars()
    compiled.eos_ids, compiled._ends_are_tokens = frozenset({SIZE}), False
    compiled._special = sorted({*compiled._special, SIZE})
    state = compiled.start(Grammar.regex("a*"))
    mask = state.mask()
    assert mask is not None
    assert only_token(mask) is None or tokens_in(mask) == {*ids("a")}
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert not bits[SIZE:].any()


def test_masks_of_a_draft_at_a_limit_are_those_of_a_fresh_start() -> None:
    """The first mask is left to a worker; once it is known, those of a draft do not wait for one."""
    state, alone = beside("a[bc]*"), beside("a[bc]*")
    paths = beginnings("abc")
    state._masks.clear()
    state._matcher.consume_token(ids("x")[0])  # does not fit: an error for good, as at a limit
    state.look(paths)
    assert not state.looked
    state._masks[()] = alone.mask()
    state.look(paths)
    for path in paths:
        assert tokens_in(state.known(path)) == tokens_in(alone.mask(path))
