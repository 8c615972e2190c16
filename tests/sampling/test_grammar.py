"""Grammars: what is allowed after which tokens, along drafts and back; what cannot be used is refused in time."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from paceline.engine.admission import grammars_of
from paceline.errors import InvalidRequest, MissingExtra, UnknownOption
from paceline.sampling.grammar import Grammar, Grammars, GrammarState
from paceline.types import Finish, SamplingParams
from tests.text.vocabularies import PERSON, byte_level_tokenizer, sentencepiece_tokenizer, smollm2

TOKENIZER = byte_level_tokenizer()
SIZE = TOKENIZER.vocab_size + 3  # some models pad their embedding
EOS = 2


def grammars(**options: Any) -> Grammars:
    made = grammars_of(TOKENIZER, vocab_size=SIZE, eos_ids=(EOS,))
    made._cached = options.get("cached", made._cached)
    return made


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_bos=False)


def texts_after(state: GrammarState, text: str) -> set[bytes]:
    allowed = state.allowed(ids(text))
    assert allowed is not None
    return {TOKENIZER.token_bytes(token) for token in np.flatnonzero(allowed.numpy()).tolist()}


# ── what is allowed ──


def test_masks_along_a_path_and_back() -> None:
    state = grammars().start(Grammar.regex("(ab|ac)d?"))
    for text in ("", "a", "ab", "", "ac", "a", "acd"):
        expected = {"": {b"a"}, "a": {b"b", b"c"}, "ab": {b"d", b"<|im_end|>"}, "ac": {b"d", b"<|im_end|>"}}
        assert texts_after(state, text) == expected.get(text, {b"<|im_end|>"})


def test_a_path_that_does_not_fit_has_no_mask_and_does_no_harm() -> None:
    state = grammars().start(Grammar.regex("ab+"))
    assert state.allowed(ids("x")) is None
    assert state.allowed(ids("abxb")) is None
    assert state.allowed([EOS]) is None
    assert texts_after(state, "ab") == {b"b", b"<|im_end|>"}


def test_control_tokens_and_padding_are_in_no_grammar() -> None:
    allowed = grammars().start(Grammar.regex("(?s:.*)")).allowed(())
    assert allowed is not None
    assert len(allowed) == SIZE
    assert set(np.flatnonzero(~allowed.numpy()).tolist()) >= {0, 1, SIZE - 3, SIZE - 2, SIZE - 1}
    assert bool(allowed[EOS])
    assert bool(allowed[ids("hello")[0]])


def test_a_special_text_can_only_be_spelt() -> None:
    state = grammars().start(Grammar.choice(["<|im_start|>"]))
    assert texts_after(state, "") == {b"<"}


@pytest.mark.parametrize("chosen", ["yes", 'no "or" \\ so', "a|b", "é\n", "[x]*.(y)+?", "<|im_end|>"])
def test_choices_are_taken_literally(chosen: str) -> None:
    state = grammars().start(Grammar.choice(["yes", 'no "or" \\ so', "a|b", "é\n", "[x]*.(y)+?", "<|im_end|>"]))
    assert state.fits(ids(chosen)) == (len(ids(chosen)), Finish.STOP)


def test_the_text_ends_where_it_is_complete() -> None:
    state = grammars().start(Grammar.json_object())
    text = ids('{"a": [1, null]}')
    assert state.fits(text[:-1]) == (len(text) - 1, None)
    assert state.fits([*text, *ids(" more")]) == (len(text), Finish.STOP)
    assert state.fits([*ids('{"a"'), *ids("x")]) == (len(ids('{"a"')), Finish.ERROR)


def test_the_end_may_be_drawn_where_the_text_may_end() -> None:
    state = grammars().start(Grammar.regex("a+"))
    assert state.fits(ids("aa")) == (2, None)
    assert state.fits([*ids("a"), EOS, *ids("a")]) == (2, Finish.STOP)
    assert state.fits([EOS]) == (0, Finish.ERROR)


def test_commits_move_the_beginning() -> None:
    state = grammars().start(Grammar.regex("abcd"))
    for token in ids("abc"):
        state.allowed(ids("zz"))
        state.forced_behind(tuple(ids("zz")), 4)
        state.advance([token])
    assert texts_after(state, "") == {b"d"}
    assert state.allowed(ids("a")) is None


def test_looking_does_not_change_what_is_seen() -> None:
    """Against a state that was led straight there."""
    rng = np.random.default_rng(0)
    compiled = grammars()
    state = compiled.start(Grammar.json_schema(PERSON))
    text = ids('{"name": "bob", "kind": "hello", "age": 42, "tags": [true, false]}')
    for at in range(len(text)):
        for _ in range(3):
            path = [*text[at : at + rng.integers(0, 4)], *rng.integers(0, SIZE, rng.integers(0, 2)).tolist()]
            straight = compiled.start(Grammar.json_schema(PERSON))
            straight.advance(text[:at])
            mine, theirs = state.allowed(path), straight.allowed(path)
            assert (mine is None) == (theirs is None)
            assert mine is None or theirs is None or bool((mine == theirs).all())
        state.advance(text[at : at + 1])


# ── forced tokens ──


def test_forced_tokens() -> None:
    state = grammars().start(Grammar.choice(["hello world", "hello there"]))
    forced = state.forced[:20]
    assert TOKENIZER.decode(list(forced)) == "hello"  # how the space is spelt depends on what follows
    assert state.forced[:1] == forced[:1]
    state.advance(ids("hello"))
    state.advance(ids(" t"))
    assert TOKENIZER.decode(list(state.forced[:20])) == "here"
    assert state.forced[:2] == state.forced[:20][:2]


def test_nothing_is_forced_where_there_is_a_choice() -> None:
    state = grammars().start(Grammar.regex("[ab]c"))
    assert state.forced[:8] == ()
    state.advance(ids("a"))
    assert state.forced[:8] == tuple(ids("c"))


def test_forced_tokens_of_other_vocabularies() -> None:
    """They fit, whatever a tokenizer puts before a text."""
    for tokenizer in (sentencepiece_tokenizer(), smollm2()):
        made = grammars_of(tokenizer, vocab_size=tokenizer.vocab_size, eos_ids=tokenizer.eos_ids)
        state = made.start(Grammar.choice(["hello world, dear reader of this text"]))
        said: list[int] = []
        while (forced := state.forced[:100]) or state.fits(said)[1] is None:
            if not forced:
                allowed = state.allowed(())
                assert allowed is not None
                forced = (int(np.flatnonzero(allowed.numpy())[0]),)
            count, finish = state.fits(forced)
            assert count == len(forced)
            said += forced
            if finish is Finish.STOP:
                break
            state.advance(forced)
        assert tokenizer.decode(said, continuation=True) == "hello world, dear reader of this text"


# ── what cannot be used ──


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


REFUSED: Mapping[str, Grammar] = {
    "unclosed group": Grammar.regex("(a"),
    "look-around": Grammar.regex("(?<=a)b"),
    "backreferences": Grammar.regex(r"(a)\1"),
    "no text": Grammar.regex(r"[^\x00-\U0010FFFF]"),
    "no text that": Grammar.regex("()"),
    "Invalid type: objekt": Grammar.json_schema({"type": "objekt"}),
    "no text that this": Grammar.json_schema({"$ref": "#"}),
    "recursion limit": Grammar.json_schema(deep(200)),
    "too big ": Grammar.json_schema({"properties": {f"p{i}": {"type": "string"} for i in range(5000)}}),
    "not false": Grammar.json_schema(False),
    "or a text in it is too big": Grammar.json_schema({"const": "x" * 9000}),
    "a pattern or a": Grammar.json_schema({"properties": {"a": {"pattern": "x" * 9000}}}),
    "patterns are too big": Grammar.json_schema({"anyOf": [{"pattern": "x" * 8000}] * 5}),
    "9 patterns beside allOf": Grammar.json_schema({"allOf": [{"pattern": f"a{{{i}}}"} for i in range(9)]}),
    "multipleOf is too big": Grammar.json_schema({"type": "integer", "multipleOf": 99991}),
    "a multipleOf is": Grammar.json_schema({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}], "type": "integer"}),
    "x-guidance has 'whitespace_pattern'": Grammar.json_schema({"x-guidance": {"whitespace_pattern": "(a*)*"}}),
    "a choice is too big": Grammar.choice(["x" * 9000]),
    "does not fetch": Grammar.json_schema({"$ref": "file:///etc/passwd"}),
    "JSON list of": Grammar("choice", "[1]"),
    "Expecting value": Grammar("choice", "yes"),
    "contains": Grammar.json_schema({"type": "array", "contains": {"const": 1}}),
    "made by Grammar.calls": Grammar("calls", "{}"),
    "made by": Grammar("calls", "[]"),
    "it is not JSON": Grammar.json_schema("{nonsense"),
    "an object or true": Grammar.json_schema("[1]"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_used_is_refused(reason: str) -> None:
    compiled = grammars()
    with pytest.raises(InvalidRequest, match=reason.strip()):
        compiled.compile(REFUSED[reason])
    assert len(compiled) == 0


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.regex("(a+)+b"),
        Grammar.json_schema(True),
        Grammar.json_schema({"type": "number", "multipleOf": 0.01, "allOf": [{"minimum": 1}]}),
        Grammar.regex(".*a.{300}"),
        Grammar.json_schema({"type": "object", "properties": {"next": {"$ref": "#"}}}),
        Grammar.json_schema(deep(60)),
        Grammar.json_schema({"type": "string", "pattern": "^((a+)+)+$"}),
        Grammar.json_schema({"type": "array", "minItems": 1_000_000}),
    ],
)
def test_hard_ones_are_served(grammar: Grammar) -> None:
    state = grammars().start(grammar)
    assert state.allowed(()) is not None


def test_a_grammar_that_runs_into_a_limit_ends_the_answer_and_nothing_else() -> None:
    compiled = grammars()
    explosive = Grammar.regex("((a{1,100}){1,100}){1,100}")
    for _ in range(2):  # what one sequence did to it, the next does not feel
        state = compiled.start(explosive)
        for _ in range(200):
            count, finish = state.fits(ids("a"))
            if finish is not None:
                break
            state.advance(ids("a"))
        assert (count, finish) == (1, Finish.ERROR)  # the last token fits, what may follow is not known
        assert len(state._committed) > 3
    assert compiled.start(Grammar.regex("ab")).fits(ids("ab")) == (2, Finish.STOP)


def test_an_error_along_a_draft_is_forgotten() -> None:
    state = grammars().start(Grammar.regex("b|((a{1,100}){1,100}){1,100}"))
    assert state.allowed(ids("a" * 90)) is None
    assert texts_after(state, "") == {b"a", b"b"}
    assert state.fits(ids("b")) == (1, Finish.STOP)


def test_compiled_grammars_are_kept_and_bounded() -> None:
    compiled = grammars(cached=3)
    built: list[str] = []
    matcher = compiled._compile
    compiled._compile = lambda grammar: (built.append(grammar.text), matcher(grammar))[1]
    for text in "aabcadea":
        compiled.start(Grammar.regex(text))
        assert len(compiled) <= 3
    assert "".join(built) == "abcde"


def test_any_thread_may_compile() -> None:
    compiled = grammars(cached=3)
    state = compiled.start(Grammar.json_schema(PERSON))
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(compiled.start, Grammar.regex(f"a{{{i % 9 + 1}}}")) for i in range(60)]
        for token in ids('{"name": "bob", "kind": "hello", "age": 42, "tags": [true, false]'):
            assert state.fits([token]) == (1, None)
            state.advance([token])
        for i, job in enumerate(jobs):
            assert job.result().fits(ids("a" * 20)) == (i % 9 + 1, Finish.STOP)
    assert len(compiled) <= 3


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(MissingExtra, match=r"pip install .*\[grammar\]"):
        grammars().compile(Grammar.json_object())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar("jsn", "x"), "unknown grammar"),
        (lambda: Grammar.regex(""), "needs a text"),
        (lambda: Grammar("json_object", "x"), "takes no text"),
        (lambda: Grammar.regex("a" * (1 << 13) + "a"), "at most 8192 characters"),
        (lambda: Grammar.json_schema({"enum": [f"v{i}" for i in range(100_000)]}), "at most 262144 characters"),
        (lambda: Grammar.choice([f"v{i}" for i in range(100_000)]), "at most 65536 characters"),
        (lambda: Grammar.regex("\ud800"), "half a surrogate pair"),
        (lambda: Grammar.regex(5), "given as a text"),
        (lambda: Grammar.choice([]), "non-empty texts"),
        (lambda: Grammar.choice(["a", ""]), "non-empty texts"),
        (lambda: Grammar.choice("ab"), "must be a list"),
        (lambda: Grammar.json_schema({"a": {1, 2}}), "not JSON"),
        (lambda: SamplingParams(grammar="json"), "must be a Grammar"),
        (lambda: SamplingParams(grammar=Grammar.json_object(), ignore_eos=True), "leave out ignore_eos"),
        (lambda: SamplingParams(grammar=Grammar.json_object(), allowed_tokens=(1,)), "leave out allowed_tokens"),
    ],
)
def test_descriptions_that_make_no_sense(make: Any, message: str) -> None:
    with pytest.raises((InvalidRequest, UnknownOption), match=message):
        make()
