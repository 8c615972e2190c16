"""Long texts: slices give the ids of the whole, and no text has fewer tokens than its size says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from paceline.chat.template import ChatTemplate
from paceline.errors import ContextTooLong
from paceline.text import slices
from paceline.text.pretokenizers import KNOWN
from paceline.text.slices import LongText
from paceline.text.tokenizer import Tokenizer
from paceline.text.vocabulary import TokenizerParts
from tests.text import vocabularies
from tests.text.vocabularies import byte_level, byte_level_json, save, sentencepiece, sentencepiece_json

MERGED = ["a b", "Ġ a", "Ġa b", "h e", "l l", "he ll", "hell o", "Ġ Ġ", "ĠĠ ĠĠ", "' s", "1 1", "Ċ Ċ", "Ġ 1", "! !"]
ODD = [
    " ",
    "  ",
    "a",
    "b",
    "ab",
    "hello",
    "Z",
    "'s",
    "'S",
    "'ll",
    "1",
    "12",
    "!",
    "!!",
    "/",
    "\n",
    "\r\n",
    "\t",
    "\u00a0",
]
ODD += ["é", "e\u0301", "\u212b", "中", "\U0001f600", "▁", "Ġ", "<tool_call>", "<|im_end|>", "\x04", "_", "\u0345", "ͅ"]
texts = st.lists(st.sampled_from(ODD), max_size=30).map("".join) | st.text(max_size=40)


@cache
def gguf(name: str) -> Tokenizer:
    tokens = [*byte_level()["tokenizer.ggml.tokens"][:259], *(merge.replace(" ", "") for merge in MERGED)]
    kinds = [3] * 3 + [1] * (len(tokens) - 3)
    return Tokenizer.from_gguf(byte_level(pre=name, tokens=tokens, token_type=kinds, merges=MERGED))


@cache
def sentencepiece_gguf(space: bool) -> Tokenizer:
    return Tokenizer.from_gguf(sentencepiece(add_space_prefix=space))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokenizer]:
    @cache
    def of(scheme: str) -> Tokenizer:
        made = byte_level_json() if scheme == "bytes" else sentencepiece_json(scheme)
        return Tokenizer.from_directory(save(tmp_path_factory.mktemp(scheme), made))

    return of


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer._parts.encoder.encode(text, add_special_tokens=False).ids


def check(tokenizer: Tokenizer, text: str) -> None:
    """Compare the slices with the whole, and the bound with the count, at places of every kind."""
    expected = whole(tokenizer, text)
    assert tokenizer.encode(text, add_bos=False) == expected
    assert tokenizer._long.fewest_tokens(text) <= len(expected)
    assert tokenizer._long.fewest_tokens(text, control=True) <= len(tokenizer.encode(text, special=True, add_bos=False))
    around = f"{text}a b{text} c{text}"
    assert tokenizer.encode(around, add_bos=False) == whole(tokenizer, around)


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_CHARACTERS", 1)


@pytest.mark.parametrize("name", sorted({pre.patterns: name for name, pre in KNOWN.items()}.values()))
def test_slices_of_every_pattern_give_the_ids_of_the_whole(name: str) -> None:
    tokenizer = gguf(name)
    assert tokenizer._long.cuts
    assert tokenizer._long.longest_token

    @settings(max_examples=60, deadline=None)
    @given(texts)
    def same(text: str) -> None:
        check(tokenizer, text)

    same()


@pytest.mark.parametrize("space", [True, False])
@settings(max_examples=100, deadline=None)
@given(text=texts)
def test_slices_of_sentencepiece_give_the_ids_of_the_whole(space: bool, text: str) -> None:
    assert sentencepiece_gguf(space)._long.cuts
    check(sentencepiece_gguf(space), text)


@pytest.mark.parametrize("scheme", ["bytes", "legacy", "always", "first", "never"])
def test_slices_of_a_directory_give_the_ids_of_the_whole(saved: Callable[[str], Tokenizer], scheme: str) -> None:
    tokenizer = saved(scheme)
    assert tokenizer._long.cuts

    @settings(max_examples=60, deadline=None)
    @given(texts)
    def same(text: str) -> None:
        check(tokenizer, text)

    same()


@settings(max_examples=100, deadline=None)
@given(text=texts)
def test_slices_of_smollm2_give_the_ids_of_the_whole(text: str) -> None:
    check(vocabularies.smollm2(), text)


def test_a_text_is_cut_between_words_alone() -> None:
    cut = [part for _, part in gguf("gpt-2")._long.slices("a b  c d\ne 1 f ég h, i j")]
    assert cut == ["a", " b  c", " d\ne 1 f ég", " h, i", " j"]
    assert [part for _, part in sentencepiece_gguf(True)._long.slices("ab cd ef")] == ["ab", "cd", "ef"]


# ── encoders that promise nothing ──


def changed(**parts: Any) -> LongText:
    made = byte_level_json()
    for name, part in parts.items():
        setattr(made, name, part)
    return LongText.of(made, gguf("gpt-2").vocabulary)


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": normalizers.Strip()},
        {"normalizer": normalizers.Replace("  ", " ")},
        {"normalizer": normalizers.Replace(" ", "")},
        {"normalizer": normalizers.Prepend("x")},
        {"normalizer": normalizers.NFKC()},
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\s+"), "removed"), BYTES])},
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), BYTES])},
    ],
)
def test_an_encoder_that_drops_text_has_neither_bound_nor_cuts(parts: dict[str, Any]) -> None:
    long = changed(**parts)
    assert (long.longest_token, long.cuts) == (None, False)


def test_an_unknown_pattern_has_a_bound_and_no_cuts() -> None:
    words = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\w+ \w+|."), "isolated"), BYTES])
    long = changed(pre_tokenizer=words)
    assert long.longest_token is not None
    assert not long.cuts


def test_tokens_that_reach_over_a_space_forbid_cuts() -> None:
    vocabulary = gguf("gpt-2").vocabulary
    over = replace(vocabulary, tokens=(*vocabulary.tokens, "aĠb"))
    assert LongText.of(byte_level_json(), vocabulary).cuts
    assert not LongText.of(byte_level_json(), over).cuts
    for token in (AddedToken("New York"), AddedToken("x", rstrip=True), AddedToken("x", single_word=True)):
        made = byte_level_json()
        made.add_tokens([token])
        assert not LongText.of(made, vocabulary).cuts


def test_bytes_without_a_token_count_for_nothing(saved: Callable[[str], Tokenizer]) -> None:
    made = byte_level_json()
    state = made.to_str().replace('"Ĥ":', '"[nothing]":')  # the byte 0x82, which ends "ਂ"
    long = LongText.of(tokenizers.Tokenizer.from_str(state), gguf("gpt-2").vocabulary)
    assert long.dropped == b"\x82"
    assert long.fewest_tokens("\x82" * 1000) == LongText.of(made, gguf("gpt-2").vocabulary).fewest_tokens("\x82" * 500)
    assert saved("legacy")._long.longest_token == len("▁hello".encode())


def test_composing_shortens_a_text_by_no_more_than_the_bound_allows() -> None:
    tokenizer = gguf("qwen2")
    for text in ("\u0041\u030a\u0301", "\u03b1\u0313\u0300\u0345", "\u1112\u1161\u11ab", "\u212a", "\u1fef"):
        ids = whole(tokenizer, text * 500)
        assert tokenizer._long.fewest_tokens(text * 500) <= len(ids)


# ── limits ──


class Counting:
    """An encoder that counts the characters that reach it."""

    def __init__(self, encoder: Any) -> None:
        self.encoder, self.characters = encoder, 0

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.characters += sum(map(len, texts))
        return self.encoder.encode_batch_fast(texts, **options)


def counted(tokenizer: Tokenizer) -> Tokenizer:
    parts: TokenizerParts = tokenizer._parts
    copy = Tokenizer(parts)
    counting: Any = Counting(parts.encoder)
    copy._parts = replace(parts, encoder=counting, inner_encoder=counting)
    return copy


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    monkeypatch.setattr(slices, "SLICE_CHARACTERS", 1000)
    return counted(vocabularies.byte_level_tokenizer())


def reached(tokenizer: Tokenizer) -> int:
    encoder: Any = tokenizer._parts.encoder
    count: int = encoder.characters
    return count


def test_a_text_that_cannot_fit_never_reaches_the_encoder(counting: Tokenizer) -> None:
    longest = counting._long.longest_token
    assert longest
    with pytest.raises(ContextTooLong, match=f"the text has {100 * longest + 1} characters and at least 101 tokens; "):
        counting.encode("a" * (100 * longest + 1), limit=100)
    assert reached(counting) == 0
    with pytest.raises(ContextTooLong, match="and 1100 tokens; the context holds 100: shorten it"):
        counting.encode("a" * (100 * longest), limit=100)


def test_a_text_is_read_no_further_than_the_limit(counting: Tokenizer) -> None:
    with pytest.raises(ContextTooLong, match=r"at least 1[0-9]{3} tokens; the context holds 1000: shorten it"):
        counting.encode("a " * 5000, limit=1000)
    assert reached(counting) <= 2002
    assert len(counting.encode("a " * 500, limit=1000)) == 1000


@pytest.mark.parametrize("strips", [False, True])
def test_control_tokens_are_longer_than_others(tmp_path: Path, strips: bool) -> None:
    made = byte_level_json()
    made.add_special_tokens([AddedToken("<|a_long_control_token|>", normalized=False, special=True, rstrip=strips)])
    tokenizer = Tokenizer.from_directory(save(tmp_path, made))
    text = "<|a_long_control_token|>      " * 50 if strips else "<|a_long_control_token|>" * 50
    assert len(tokenizer.encode(text, special=True, add_bos=False, limit=50)) == 50
    with pytest.raises(ContextTooLong, match="at least 51 tokens; the context holds 50" if strips else "51 tokens"):
        tokenizer.encode(text + "a", special=True, limit=50)
    with pytest.raises(ContextTooLong, match="at least"):
        tokenizer.encode(text, limit=50)


def test_a_chat_is_refused_by_its_size(counting: Tokenizer) -> None:
    template = ChatTemplate(counting)
    for text in ("a" * 10_000, "<|im_end|>" * 1000, "a b" * 4000):
        with pytest.raises(ContextTooLong, match="the context holds 200: shorten it"):
            template.encode([{"role": "user", "content": text}], limit=200)
    assert reached(counting) == 0
    assert template.encode([{"role": "user", "content": "hello"}], limit=200)


def test_a_directory_has_the_same_facts_as_its_parts(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(save(tmp_path, sentencepiece_json("legacy")))
    assert tokenizer._long.puts_space
    assert not Tokenizer.from_directory(save(tmp_path, sentencepiece_json("never")))._long.puts_space
