"""Masks as words for a device: packed, computed together, left to workers, and compared with what was drawn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from paceline.sampling import grammar_state
from paceline.sampling.grammar import Grammar, Grammars, GrammarState
from paceline.sampling.grammar_state import Outlook
from paceline.sampling.sampler import Sampler
from paceline.sampling.words import Branch, MaskSheet, branches, has_token, mask_words, pack
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
    assert len(mask) == mask_words(97) == 4
    assert {token for token in range(97) if has_token(mask, token)} == {*tokens}


@pytest.mark.parametrize("vocab_size", [1, 125, 126, 127, 128, 49152])
def test_a_mask_has_room_for_an_end_and_for_a_token_that_is_never_allowed(vocab_size: int) -> None:
    assert 32 * mask_words(vocab_size) >= vocab_size + 3
    assert mask_words(vocab_size) % 4 == 0  # each mask of a sheet begins at an aligned address


def test_branches_of_a_tree() -> None:
    assert branches([(), (1,), (2,), (1, 3), (1, 4)], 10) == [
        Branch((2,), [10, 12]),
        Branch((1, 3), [10, 11, 13]),
        Branch((1, 4), [10, 11, 14]),
    ]
    assert branches([()], 3) == [Branch((), [3])]


# ── sheets ──


def test_rows_of_a_sheet_have_the_masks_that_were_written() -> None:
    sheet, [a, b] = MaskSheet.empty(6, 8, SIZE), (pack(tokens, SIZE) for tokens in ([1], [2, 200]))
    for _ in range(2):
        sheet.put((4, 1), (a, None))
        sheet.put((2,), (b,))
        sheet.put((4,), (b,))  # the latest counts
        sheet.settle()
        assert [row for row, mask in enumerate(sheet.which) if mask >= 0] == [2, 4]
        assert all(np.array_equal(sheet.words[sheet.which[row]], b) for row in (2, 4))
        assert np.array_equal(sheet.masks_of([2])[0], b)
        sheet.clear()
        assert (sheet.which == -1).all()
        assert sheet.used == 0


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
    monkeypatch.setattr(grammar_state, "MAX_INLINE_SECONDS", 1e9)
    state.mask(ids("a"))
    assert not state.slow
    assert state.fits(ids("ab")) == (2, None)
    state.advance(ids("ab"))
    assert not state.looked
    monkeypatch.setattr(grammar_state, "MAX_INLINE_SECONDS", 0.0)
    assert state.slow


def beginnings(text: str) -> list[tuple[int, ...]]:
    tokens = ids(text)
    return [tuple(tokens[:count]) for count in range(len(tokens) + 1)]


def filled(state: GrammarState, paths: Sequence[tuple[int, ...]]) -> tuple[Outlook, dict[tuple[int, ...], np.ndarray]]:
    """Fill a sheet with the masks behind paths, one for each row. Return the outlook, and the masks that are there."""
    sheet = MaskSheet.empty(len(paths), 2 * len(paths), SIZE)
    outlook = state.fill(branches(paths, 0), sheet)
    sheet.settle()
    return outlook, {path: sheet.words[mask] for path, mask in zip(paths, sheet.which, strict=True) if mask >= 0}


@pytest.mark.parametrize(
    ("kind", "before", "paths", "fitting"),
    [
        (Grammar.json_schema(PERSON), "", beginnings('{"name": "b'), None),
        (Grammar.json_schema(PERSON), "{", beginnings('"name": "b'), None),
        (Grammar.regex("[a-z]+"), "", [(), *beginnings("ab")[1:], *beginnings("ac")[2:], *beginnings("b")[1:]], None),
        (Grammar.regex("[ab]+"), "a", [(), *beginnings("xa")[1:], *beginnings("xb")[2:], *beginnings("ba")[1:]], 3),
        (Grammar.json_schema(PERSON), "", beginnings("x"), 1),
        (Grammar.regex("a[bc]*"), "ab", beginnings("bbx"), 3),
    ],
)
@pytest.mark.parametrize("known", [False, True])
def test_masks_of_a_draft_are_those_of_each_path_alone(
    kind: Grammar, before: str, paths: list[tuple[int, ...]], fitting: int | None, known: bool
) -> None:
    """Of chains and trees, with drafts that do not fit; the matcher is then where it was. A worker may have computed
    the first mask."""
    state, alone = grammars().start(kind), grammars().start(kind)
    for each in (state, alone):
        each.advance(ids(before))
    state._masks.clear()
    if known:
        state.mask()
    outlook, masks = filled(state, paths)
    assert outlook is Outlook.TOKENS
    assert len(masks) == (len(paths) if fitting is None else fitting)
    for path, mask in masks.items():
        assert tokens_in(mask) == tokens_in(alone.mask(path))
    assert state.fits(paths[1])[0] == alone.fits(paths[1])[0]


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(("pattern", "outlook"), [("ab", Outlook.END), ("ab*", Outlook.TOKENS)])
@pytest.mark.parametrize("ends", [True, False], ids=["an end", "no end"])
def test_only_the_end_may_follow_a_text_that_is_complete(
    pattern: str, outlook: Outlook, ends: bool, known: bool
) -> None:
    """Also in a vocabulary without a token for the end."""
    compiled = grammars() if ends else without_end()
    state = compiled.start(Grammar.regex(pattern))
    state.advance(ids("ab"))
    state._masks.clear()
    if known:
        state.mask()
    seen, masks = filled(state, [()])
    assert seen is outlook
    assert (EOS in tokens_in(masks[()])) is ends


def test_stops_are_left_out_of_a_sheet_before_min_tokens() -> None:
    [a] = ids("a")
    for min_tokens, wanted in ((9, {a}), (2, {a}), (0, {a, EOS})):
        sampler = sampler_of("a{1,5}", min_tokens=min_tokens)
        sampler.advance(ids("a"))
        sheet = MaskSheet.empty(2, 2, SIZE)
        assert sampler.fill([Branch((a,), range(2))], sheet) is Outlook.TOKENS
        assert tokens_in(sheet.words[0]) == wanted
        assert tokens_in(sheet.words[1]) == ({a} if min_tokens == 9 else {a, EOS})


def test_branches_behind_a_token_that_does_not_fit_have_no_mask_before_min_tokens() -> None:
    """The second branch leaves the first one behind a token that the grammar forbids."""
    [a], [b], [c] = ids("a"), ids("b"), ids("c")
    sampler = sampler_of("a{1,5}", min_tokens=9)
    sampler.advance(ids("a"))
    sheet = MaskSheet.empty(4, 4, SIZE)
    drafted = [Branch((b, a), (0, 1, 2)), Branch((b, c), (0, 1, 3))]
    assert sampler.fill(drafted, sheet) is Outlook.TOKENS
    assert tokens_in(sheet.words[0]) == {a}
    assert sheet.masks_of([3]) == [None]


def test_forced_tokens_are_known_from_the_commit_on() -> None:
    free, bound = beside("[a-z]+!"), beside("[a-z]hello")
    assert free.forced == bound.forced == ()
    for state in (free, bound):
        state.advance(ids("a"))
    assert free.forced == ()
    assert bound.forced == tuple(ids("hello"))


def test_forced_tokens_are_those_behind_the_latest_commit() -> None:
    """Also where the tokens before were checked, and these were not."""
    [a], state = ids("a"), beside("[ab]{3}c")
    state.advance([a])
    assert state.fitting([a]) == 1
    state.advance([a])
    assert state.forced == ()
    state.advance([a])
    assert state.forced == tuple(ids("c"))


def without_end() -> Grammars:
    compiled = grammars()
    return Grammars(compiled._tokens, special=[], eos_ids=(), vocab_size=SIZE, encode=ids)


def test_an_end_that_is_no_token_is_in_no_mask() -> None:
    mask = without_end().start(Grammar.regex("a*")).mask()
    assert mask is not None
    assert not np.unpackbits(mask.view(np.uint8), bitorder="little")[SIZE:].any()


def test_masks_of_a_draft_at_a_limit_are_those_of_a_fresh_start() -> None:
    """The first mask is left to a worker; once it is known, those of a draft do not wait for one."""
    state, alone = beside("a[bc]*"), beside("a[bc]*")
    paths = beginnings("abc")
    state._masks.clear()
    state._matcher.consume_token(ids("x")[0])  # does not fit: an error for good, as at a limit
    assert filled(state, paths)[0] is Outlook.UNKNOWN
    assert not state.looked
    state.mask()
    outlook, masks = filled(state, paths)
    assert outlook is Outlook.TOKENS
    for path in paths:
        assert tokens_in(masks[path]) == tokens_in(alone.mask(path))


def test_a_grammar_that_cannot_be_followed_has_no_outlook() -> None:
    state = beside("ab")
    state.advance(ids("x"))
    assert filled(state, [()])[0] is Outlook.UNKNOWN
    assert state.mask() is None
    assert filled(state, [()])[0] is state.outlook() is Outlook.NOTHING


def test_waiting_for_others_makes_no_mask_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a mask is that of its own thread, whatever runs in between."""
    state = beside("a[bc]*")
    state.advance(ids("a"))
    monkeypatch.setattr(grammar_state.time, "thread_time", lambda: 1.0)
    filled(state, beginnings("bc"))
    assert not state.slow
