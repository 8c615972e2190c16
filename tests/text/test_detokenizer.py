from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.text.detokenizer import IncrementalDecoder, StopChecker, StopMatch, TextStream
from paceline.text.tokenizer import Tokenizer
from tests.text.vocabularies import byte_level_json, byte_level_tokenizer, sentencepiece_tokenizer, smollm2

MAKERS = [byte_level_tokenizer, sentencepiece_tokenizer, smollm2]

# ── one by one as all at once ──


@given(data=st.data(), skip_special=st.booleans(), continuation=st.booleans())
@settings(max_examples=120, deadline=None)
@pytest.mark.parametrize("make", MAKERS)
def test_pieces_make_the_whole(
    make: Callable[[], Tokenizer], data: st.DataObject, skip_special: bool, continuation: bool
) -> None:
    tokenizer = make()
    ids = data.draw(st.lists(st.integers(-1, tokenizer.vocab_size + 1), max_size=30))
    decoder = IncrementalDecoder(tokenizer, skip_special=skip_special, continuation=continuation)
    pieces = [decoder.push(token_id) for token_id in ids]
    whole = tokenizer.decode(ids, skip_special=skip_special, continuation=continuation)
    assert "".join(pieces) + decoder.flush() == whole


@given(
    st.lists(st.sampled_from([b"\xf0", b"\x9f", b"\xa6", b"\x99", b"\xc3", b"\xa9", b"\xed", b"\xa0", b"a", b"\xff"]))
)
@settings(max_examples=120, deadline=None)
def test_broken_bytes_become_what_python_makes_of_them(parts: list[bytes]) -> None:
    tokenizer = byte_level_tokenizer()
    ids = [tokenizer.vocabulary.token_bytes.index(part) for part in parts]
    decoder = IncrementalDecoder(tokenizer)
    text = "".join(map(decoder.push, ids)) + decoder.flush()
    assert text == b"".join(parts).decode(errors="replace")


@given(st.lists(st.integers(0, 271), max_size=20), st.booleans())
@settings(max_examples=120, deadline=None)
def test_byte_level_decoding_is_that_of_the_tokenizers_package(ids: list[int], skip_special: bool) -> None:
    ours = byte_level_tokenizer().decode(ids, skip_special=skip_special)
    assert ours == THEIRS.decode(ids, skip_special_tokens=skip_special)


THEIRS = byte_level_json()


def test_no_half_characters() -> None:
    tokenizer = byte_level_tokenizer()
    decoder = IncrementalDecoder(tokenizer)
    assert [decoder.push(i) for i in tokenizer.encode("é🦙!")] == ["", "é", "", "", "", "🦙", "!"]


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    tokenizer = byte_level_tokenizer()
    decoder = IncrementalDecoder(tokenizer)
    assert decoder.push(tokenizer.encode("🦙")[0]) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""


def test_a_control_token_inside_a_character_is_as_if_it_were_not_there() -> None:
    tokenizer = byte_level_tokenizer()
    first, second = tokenizer.encode("é")
    decoder = IncrementalDecoder(tokenizer)
    assert [decoder.push(i) for i in (first, 2, second)] == ["", "", "é"]


def test_only_one_leading_space_is_taken_and_only_from_the_first_token() -> None:
    tokenizer = sentencepiece_tokenizer()
    two, hello = (tokenizer.vocabulary.tokens.index(token) for token in ("▁▁", "▁hello"))
    decoder = IncrementalDecoder(tokenizer)
    assert [decoder.push(i) for i in (1, two, hello)] == ["", " ", " hello"]


# ── stop strings ──


def run(pieces: Sequence[str], stops: Sequence[str], **options: Any) -> tuple[str, StopMatch | None]:
    checker = StopChecker(stops, **options)
    text = "".join(map(checker.push, pieces))
    return (text if checker.match else text + checker.flush()), checker.match


def expected(text: str, stops: Sequence[str]) -> StopMatch | None:
    """Letter by letter: the first that is complete, of several the longest."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return StopMatch(stop, end - len(stop), end)
    return None


@given(
    st.lists(st.text(alphabet="abc", max_size=5), max_size=12),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4),
    st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_stops_are_found_however_the_text_is_cut(pieces: list[str], stops: list[str], include_stop: bool) -> None:
    text = "".join(pieces)
    match = expected(text, stops)
    kept = text if match is None else text[: match.end if include_stop else match.start]
    assert run(pieces, stops, include_stop=include_stop) == (kept, match)


@given(
    st.lists(st.text(alphabet="ab", max_size=4), max_size=10),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1),
)
@settings(max_examples=120, deadline=None)
def test_only_what_may_begin_a_stop_is_held_back(pieces: list[str], stops: list[str]) -> None:
    checker = StopChecker(stops)
    seen = shown = ""
    for piece in pieces:
        seen += piece
        shown += checker.push(piece)
        if checker.match:
            break
        held = seen[len(shown) :]
        assert seen.startswith(shown)
        assert not held or any(stop.startswith(held) for stop in stops)
        assert not any(seen.endswith(stop[:n]) for stop in stops for n in range(len(held) + 1, len(stop)))


def test_nothing_follows_a_match() -> None:
    checker = StopChecker(["b"])
    assert checker.push("abc") == "a"
    assert checker.push("def") == ""
    assert checker.flush() == ""
    assert checker.match == StopMatch("b", 1, 2)


# ── both in a row ──


def test_a_stop_across_tokens_ends_the_stream() -> None:
    tokenizer = byte_level_tokenizer()
    ids = tokenizer.encode("hello world, hello moon")
    stream = TextStream(tokenizer, stops=["d, h"])
    assert stream.push(ids) == "hello worl"
    assert stream.match == StopMatch("d, h", 10, 14)
    taken = tokenizer.decode(ids[: stream.tokens])
    assert "d, h" in taken
    assert "d, h" not in tokenizer.decode(ids[: stream.tokens - 1])
    assert stream.push(ids) == ""
    assert stream.flush() == ""


@given(st.lists(st.integers(0, 271), max_size=25), st.lists(st.integers(1, 4)), st.booleans())
@settings(max_examples=120, deadline=None)
def test_accepted_runs_of_any_length_give_the_same_text(ids: list[int], runs: list[int], include_stop: bool) -> None:
    options: dict[str, Any] = {"stops": ["he", "\ufffd\ufffd", "ll"], "include_stop": include_stop}
    one, many = (TextStream(byte_level_tokenizer(), **options) for _ in range(2))
    single = "".join(one.push([i]) for i in ids)
    text, rest = "", list(ids)
    for length in [*runs, len(ids)]:
        text += many.push(rest[:length])
        rest = rest[length:]
    assert (text + many.flush(), many.match, many.tokens) == (single + one.flush(), one.match, one.tokens)


def test_a_stop_can_be_completed_by_the_end() -> None:
    tokenizer = byte_level_tokenizer()
    stream = TextStream(tokenizer, stops=["\ufffd"])
    assert stream.push(tokenizer.encode("a🦙")[:2]) == "a"
    assert stream.flush() == ""
    assert stream.match == StopMatch("\ufffd", 1, 2)


def test_stops_are_looked_for_after_the_first_tokens_only() -> None:
    tokenizer = byte_level_tokenizer()
    ids = tokenizer.encode("hello world hello world")
    stream = TextStream(tokenizer, stops=["o w"], stops_from=2)
    assert stream.push(ids) == "hello world hell"
    assert stream.match == StopMatch("o w", 16, 19)
