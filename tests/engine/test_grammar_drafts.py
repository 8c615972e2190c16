"""Drafts beside a grammar: forbidden tokens are cut, forced ones follow."""

from __future__ import annotations

import torch

from paceline.draft import EMPTY, Draft
from paceline.engine.grammar_drafts import follow_grammar
from paceline.sampling.grammar import Grammar, GrammarState
from tests.sampling.test_fitting import TOKENIZER, made

DATES = Grammar.regex("(on|at) [0-9]: (am|pm)")


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_bos=False))


def state(grammar: Grammar = DATES) -> GrammarState:
    return made().start(grammar)


def texts(draft: Draft) -> list[str]:
    return [TOKENIZER.decode(path) for path in draft.paths]


def test_a_draft_that_fits_stays() -> None:
    draft = Draft(ids("on 7"))
    assert follow_grammar(draft, state(), limit=len(draft.tokens)) is draft
    assert follow_grammar(EMPTY, state(), limit=4) is EMPTY


def test_tokens_behind_a_forbidden_one_go_with_it() -> None:
    draft = Draft(ids("on x7"))
    assert texts(follow_grammar(draft, state(), limit=2)) == ["o", "on", "on "]
    assert follow_grammar(Draft(ids("xyz")), state(), limit=8) == EMPTY


def test_forced_tokens_follow_an_end() -> None:
    drafted, limit = ids("on 7x"), 16
    followed = follow_grammar(Draft(drafted), state(), limit=limit)
    assert texts(followed)[-1] == "on 7: "
    assert followed.parents == ()
    assert len(follow_grammar(Draft(drafted), state(), limit=len(drafted)).tokens) == len(drafted)


def test_branches_of_a_tree_are_cut_and_continued() -> None:
    o, n, a, x = (ids(text)[0] for text in ("o", "n", "a", "x"))
    tree = Draft((o, a, x, n, x), (-1, -1, 0, 0, 3))
    followed = follow_grammar(tree, state(), limit=8)
    assert texts(followed)[:3] == ["o", "a", "on"]
    assert {"at", "at ", "on "} <= set(texts(followed))
    assert followed.problem(vocab_size=TOKENIZER.vocab_size, max_length=8) is None


def test_confidence_stays_with_its_tokens() -> None:
    """A forced token is as sure as the one before it."""
    o, n, a, x = (ids(text)[0] for text in ("o", "n", "a", "x"))
    tree = Draft((o, a, x, n, x), (-1, -1, 0, 0, 3), confidence=(0.5, 0.4, 0.3, 0.25, 0.1))
    followed = follow_grammar(tree, state(), limit=8)
    told = dict(zip(texts(followed), followed.confidence, strict=True))
    assert (told["o"], told["a"], told["on"]) == (0.5, 0.4, 0.25)
    assert (told["on "], told["at"], told["at "]) == (0.25, 0.4, 0.4)


def test_rules_that_want_probabilities_get_no_tokens_without() -> None:
    tokens = ids("on 7x")
    draft = Draft(tokens, probs=torch.eye(TOKENIZER.vocab_size)[list(tokens)])
    followed = follow_grammar(draft, state(), limit=16)
    assert texts(followed)[-1] == "on 7"
    assert followed.problem(vocab_size=TOKENIZER.vocab_size, max_length=16) is None
