"""Masks as words for a device: packed, computed together, left to workers, and compared with what was drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from paceline.sampling import grammar as grammar_module
from paceline.sampling.grammar import Grammar, GrammarState, look_together
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


# ── tokens drawn without their masks ──


def test_tokens_count_up_to_the_first_that_its_mask_would_have_changed() -> None:
    sampler = sampler_of("a[bc]d+")
    assert sampler.count_masked(ids("abd"), known=1) == 3
    assert sampler.count_masked(ids("axd"), known=1) == 1
    assert sampler.count_masked(ids("abb"), known=1) == 2
    assert sampler.count_masked([*ids("ab"), EOS], known=1) == 2
    assert sampler.count_masked([*ids("abd"), EOS], known=1) == 4
    assert sampler.count_masked(ids("x"), known=1) == 1  # `fits` says what is wrong with it
    assert sampler.count_masked(ids("ab"), known=3) == 2


def test_an_early_stop_is_not_what_its_mask_would_have_given() -> None:
    assert sampler_of("ad*", min_tokens=4).count_masked([*ids("ad"), EOS], known=1) == 2


def test_behind_filters_only_a_mask_of_one_token_is_sure() -> None:
    sampler = sampler_of("a[bc]dd[ef]", temperature=1.0, top_k=5)
    assert sampler.count_masked(ids("ab"), known=1) == 1
    assert sampler.count_masked(ids("abdde"), known=2) == 4
    assert sampler_of("a[bc]dd[ef]", temperature=0.0, top_k=5).count_masked(ids("abdde"), known=1) == 5


def test_a_token_that_the_parser_takes_but_the_mask_lacks_does_not_count() -> None:
    """llguidance takes other spellings of forced text than the one that its mask allows."""
    state = grammars().start(Grammar.choice(["hello world"]))
    [first] = state.forced(1)
    other = ids("h")[0]
    assert state.mask() is not None
    assert first != other
    assert not has_token(state.mask(), other)  # type: ignore[arg-type]
    sampler = sampler_of("( x)?hello world")
    assert sampler.count_masked([*ids(" x"), other], known=len(ids(" x"))) == len(ids(" x"))


# ── sure tokens ──


def test_sure_tokens_are_the_only_ones_to_come() -> None:
    state = grammars().start(Grammar.regex("ab[cd]e"))
    forced = state.forced(8)
    assert forced == tuple(ids("ab"))
    assert state.sure(forced) == 2
    assert state.sure(tuple(ids("abc"))) == 2
    assert state.sure(tuple(ids("ax"))) == 1
    assert state.sure(()) == 0


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


def test_masks_that_were_fast_are_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    state = beside("ab[cd]+")
    monkeypatch.setattr(grammar_module, "MAX_INLINE_SECONDS", 1e9)
    state.mask(ids("a"))
    assert not state.slow
    assert state.fits(ids("ab")) == (2, None)
    state.advance(ids("ab"))
    assert state.looked
    monkeypatch.setattr(grammar_module, "MAX_INLINE_SECONDS", 0.0)
    assert state.slow


def test_masks_together_are_those_of_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "MAX_INLINE_SECONDS", math.inf)
    compiled, other = grammars(), grammars()
    kinds = [Grammar.json_schema(PERSON), Grammar.regex("[a-z]+"), Grammar.json_schema(PERSON)]
    paths = [tuple(ids('{"name": "b')), tuple(ids("ab")), tuple(ids("x"))]  # the last does not fit
    states = [source.start(kind) for source, kind in zip((compiled, compiled, other), kinds, strict=True)]
    look_together(zip(states, paths, strict=True))
    assert [path in state._masks for state, path in zip(states, paths, strict=True)] == [True, True, False]
    for kind, state, path in zip(kinds, states, paths, strict=True):
        alone, together = compiled.start(kind).mask(path), state.mask(path)
        assert (alone is None) == (together is None)
        assert alone is None or together is None or bool((alone == together).all())


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
