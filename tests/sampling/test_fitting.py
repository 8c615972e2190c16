"""Tokens that fit a grammar, found without masks: exactly those that masks allow."""

from __future__ import annotations

import random

import numpy as np
import pytest

from paceline.engine.admission import grammars_of
from paceline.sampling.grammar import Grammar, Grammars, GrammarState
from paceline.types import Finish
from tests.text.vocabularies import PERSON, byte_level_tokenizer, smollm2

TOKENIZER, EOS = byte_level_tokenizer(), 2
GRAMMARS = (
    Grammar.json_schema(PERSON),
    Grammar.json_object(),
    Grammar.regex("(ab|ac)d?"),
    Grammar.regex("hello( world){1,3}(!|[?]+)"),
    Grammar.choice(["hello world", "hello there", "goodbye"]),
    Grammar.calls(Grammar.json_schema(PERSON), marks=("<tool_call>", "</tool_call>")),
)


def made() -> Grammars:
    return grammars_of(TOKENIZER, vocab_size=TOKENIZER.vocab_size, eos_ids=(EOS,))


def allowed_after(state: GrammarState, path: tuple[int, ...]) -> set[int]:
    allowed = state.allowed(path)
    return set() if allowed is None else set(np.flatnonzero(allowed.numpy()).tolist())


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
def test_fitting_tokens_are_those_of_the_mask(grammar: Grammar) -> None:
    """Behind random texts, with every token of the vocabulary."""
    some = made()
    for seed in range(4):
        draw = random.Random(seed)
        state, masked, path = some.start(grammar), some.start(grammar), ()
        for _ in range(12):
            allowed = allowed_after(masked, path)
            fitting = {token for token in range(TOKENIZER.vocab_size) if state.fitting((*path, token)) > len(path)}
            assert fitting == allowed
            texts = sorted(allowed - {EOS})
            if not texts:
                break
            path = (*path, draw.choice(texts))
            if draw.random() < 0.5:
                state.advance(path)
                masked.advance(path)
                path = ()


def test_forced_text_fits_in_one_spelling() -> None:
    """The matcher alone would follow every spelling."""
    tokenizer = smollm2()
    some = grammars_of(tokenizer, vocab_size=tokenizer.vocab_size, eos_ids=(EOS,))
    state = some.start(Grammar.choice(["say substance"]))
    whole, parts = ([tokenizer.encode(text, add_bos=False) for text in texts] for texts in ([" substance"], [" ", "s"]))
    first = tokenizer.encode("say", add_bos=False)
    assert state.fitting([*first, *whole[0]]) == len(first) + len(whole[0])
    assert state.fitting([*first, *parts[0], *parts[1]]) == len(first)
    assert state.fitting([*first, *whole[0], EOS, 5]) == len(first) + len(whole[0]) + 1


def test_no_mask_is_computed_for_tokens_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor to find that the text goes on; at its end one says that nothing else may follow."""
    some, looks, compute = made(), [], Grammars.mask
    for grammar, text in ((Grammar.json_object(), '{"a": [1, null]}'), (Grammar.regex("(?s:.*)"), "hello there")):
        state, tokens = some.start(grammar), TOKENIZER.encode(text, add_bos=False)
        monkeypatch.setattr(Grammars, "mask", lambda self, matcher: looks.append(1) or compute(self, matcher))
        for token in tokens[:-1]:
            assert state.fitting([token]) == 1
            assert state.fits([token]) == (1, None)
            state.advance([token])
        assert not looks
        monkeypatch.undo()
    assert state.fits([EOS]) == (1, Finish.STOP)


def test_a_sequence_that_starts_over_has_the_masks_of_one_that_did_not() -> None:
    """Although limits hold for each query, and a fresh matcher has to do at once what was done in many."""
    some, grammar = made(), Grammar.regex("((a{1,100}){1,100}){1,100}")
    [a] = TOKENIZER.encode("a", add_bos=False)
    state = some.start(grammar)
    for _ in range(26):
        assert state.mask() is not None
        state.advance([a])
    assert state.fitting([a] * 12) < 12, "the test needs a grammar that runs into a limit"
    assert state.mask() is not None
    assert state.strained
