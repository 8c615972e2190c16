"""A bridge between vocabularies: bytes are kept, words line up, and control tokens stay control tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from paceline.text import bridge
from paceline.text.bridge import VocabularyBridge
from paceline.text.tokenizer import Tokenizer
from tests.text.vocabularies import byte_level_tokenizer, metadata, save, sentencepiece_json, sentencepiece_tokenizer

BYTE_LEVEL, SPM = byte_level_tokenizer(), sentencepiece_tokenizer()
PAIRS = {
    "bytes to spm": VocabularyBridge(BYTE_LEVEL, SPM),
    "spm to bytes": VocabularyBridge(SPM, BYTE_LEVEL),
}
EMOJI = "hello 😀 world"


def bytes_of(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    return b"".join(map(tokenizer.vocabulary.text_bytes.__getitem__, ids))


def random_texts(count: int = 60) -> list[str]:
    drawn = random.Random(5)
    letters = "helo wrd\n\té漢😀\u0301  "
    return ["".join(drawn.choices(letters, k=drawn.randrange(1, 40))) for _ in range(count)]


@pytest.mark.parametrize("pair", PAIRS)
def test_a_translation_has_the_same_bytes(pair: str) -> None:
    made = PAIRS[pair]
    for text in random_texts():
        ids = made.target.encode_piece(text)
        there = made.to_drafter.text(ids)
        assert bytes_of(made.drafter, there) == text.encode()
        assert bytes_of(made.target, made.to_target.text(there)) == text.encode()


@pytest.mark.parametrize("pair", PAIRS)
def test_any_tokens_have_a_translation_of_the_same_bytes(pair: str) -> None:
    """Also tokens that no encoder would write, and broken characters."""
    made, drawn = PAIRS[pair], random.Random(7)
    texts = [token for token, data in enumerate(made.target.vocabulary.text_bytes) if data]
    for _ in range(60):
        ids = drawn.choices(texts, k=drawn.randrange(1, 30))
        assert bytes_of(made.drafter, made.to_drafter.text(ids)) == bytes_of(made.target, ids)


def test_usual_words_become_usual_words() -> None:
    text = "hello world hello"
    for made in PAIRS.values():
        assert made.to_drafter.text(made.target.encode_piece(text)) == made.drafter.encode_piece(text)


def test_an_unusual_word_is_translated_token_by_token() -> None:
    made = PAIRS["bytes to spm"]
    by_bytes = BYTE_LEVEL.vocabulary.ids_by_bytes
    unusual = [by_bytes[data] for data in (b"h", b"e", b"ll", b"o")]  # the encoder writes one token
    assert [SPM.id_to_token(token) for token in made.to_drafter.text(unusual)] == ["h", "e", "ll", "o"]
    usual = BYTE_LEVEL.encode_piece("hello")
    assert [SPM.id_to_token(token) for token in made.to_drafter.text(usual)] == ["hello"]


@pytest.mark.parametrize("pair", PAIRS)
def test_an_emoji_that_is_cut(pair: str) -> None:
    made = PAIRS[pair]
    ids = made.target.encode_piece(EMOJI)
    for cut in range(len(ids) + 1):
        begun = bytes_of(made.target, ids[:cut])
        assert bytes_of(made.drafter, made.to_drafter.text(ids[:cut])) == begun


def test_control_tokens_never_become_text() -> None:
    made = PAIRS["bytes to spm"]
    start, end = (BYTE_LEVEL.find_control(text)[0][2] for text in ("<|im_start|>", "<|im_end|>"))
    assert made.to_drafter.text([end]) == [SPM.eos_ids[0]]  # by role
    assert made.to_drafter.text([0]) == [SPM.eos_ids[0]], "an end of an answer, by role, though it is also the bos"
    assert made.to_drafter.text([start]) == []  # without a partner
    as_text = BYTE_LEVEL.encode_piece("<|im_end|>")
    assert bytes_of(SPM, made.to_drafter.text(as_text)) == b"<|im_end|>"
    assert not SPM.vocabulary.special.intersection(made.to_drafter.text(as_text))


def test_control_tokens_of_one_name() -> None:
    names = {"model": "gpt2", "pre": "gpt-2", "merges": ["x y"], "token_type": [3, 1, 1, 1, 3]}
    one = Tokenizer.from_gguf(metadata(**names, tokens=["<s>", "x", "y", "xy", "<|im_start|>"], bos_token_id=0))
    other = Tokenizer.from_gguf(metadata(**names, tokens=["<|im_start|>", "y", "x", "xy", "<b>"], bos_token_id=4))
    made = VocabularyBridge(one, other)
    assert made.to_drafter.text([0, 4, 1]) == [4, 0, 2]
    assert made.to_target.text([4, 0, 2]) == [0, 4, 1]


def test_ids_without_a_token() -> None:
    made = PAIRS["bytes to spm"]
    assert made.to_drafter.text([BYTE_LEVEL.vocab_size + 5, -1]) == []
    assert made.to_drafter.text([]) == []


def test_shares() -> None:
    made = PAIRS["bytes to spm"]
    texts = sum(map(bool, BYTE_LEVEL.vocabulary.text_bytes))
    expected = {data for data in BYTE_LEVEL.vocabulary.text_bytes if data in SPM.vocabulary.ids_by_bytes}
    assert made.common == len(expected) > 256
    assert made.share == made.common / texts
    assert made.share_of(["hello"]) == 1
    assert made.share_of([]) == 0
    assert 0 < made.share_of(["hello <tool_call>im"]) < 1


def test_a_whole_character_goes_before_its_byte_token() -> None:
    assert SPM.id_to_token(SPM.vocabulary.ids_by_bytes[b"h"]) == "h"
    assert SPM.id_to_token(SPM.vocabulary.ids_by_bytes[b"Z"]) == "<0x5A>"


def test_long_words_are_cut_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made = VocabularyBridge(BYTE_LEVEL, SPM)
    monkeypatch.setattr(bridge, "MAX_KNOWN_WORDS", 2)
    long = BYTE_LEVEL.encode_piece("漢" * 40)
    assert bytes_of(SPM, made.to_drafter.text(long)) == ("漢" * 40).encode()
    assert max(map(len, made.to_drafter._known)) <= bridge.MAX_WORD_TOKENS
    assert len(made.to_drafter._known) <= 2


def test_bytes_that_the_other_vocabulary_lacks() -> None:
    names = {"model": "gpt2", "pre": "gpt-2", "merges": ["x y"], "token_type": [1, 1, 1]}
    made = VocabularyBridge(BYTE_LEVEL, Tokenizer.from_gguf(metadata(**names, tokens=["x", "y", "xy"])))
    assert made.to_drafter.text(BYTE_LEVEL.encode_piece("hello xy")) == [0, 1], "the rest goes on without them"
    assert made.to_drafter.text(BYTE_LEVEL.encode_piece("xy")) == [2]
    assert made.to_drafter.text(BYTE_LEVEL.encode_piece("é")) == []


@pytest.mark.parametrize("text", ["hello", " hello", "world hello"])
def test_a_piece_has_no_space_before_it(text: str) -> None:
    for tokenizer in (BYTE_LEVEL, SPM):
        assert bytes_of(tokenizer, tokenizer.encode_piece(text)) == text.encode()


@pytest.mark.parametrize("scheme", ["legacy", "always", "first", "never"])
def test_a_piece_of_a_directory_s_tokenizer(scheme: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(save(tmp_path, sentencepiece_json(scheme)))
    for text in ("hello", " hello", "world hello"):
        assert bytes_of(tokenizer, tokenizer.encode_piece(text)) == text.encode()
