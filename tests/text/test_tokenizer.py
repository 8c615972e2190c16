from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import InvalidRequest
from paceline.text.tokenizer import Tokenizer
from tests.text.vocabularies import byte_level, byte_level_tokenizer, sentencepiece, sentencepiece_tokenizer, smollm2

CASES = json.loads((Path(__file__).parents[1] / "data" / "smollm2_tokens.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: ascii(case["text"])[:24])
def test_smollm2_gives_the_ids_of_its_original_tokenizer(case: dict[str, Any]) -> None:
    assert smollm2().encode(case["text"]) == case["ids"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: ascii(case["text"])[:24])
def test_smollm2_decodes_what_it_encoded(case: dict[str, Any]) -> None:
    assert smollm2().decode(smollm2().encode(case["text"])) == case["text"]


def test_smollm2_knows_its_special_tokens() -> None:
    tokenizer = smollm2()
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (49152, 1, (2, 0))
    assert 2 in tokenizer.vocabulary.special
    assert 400 not in tokenizer.vocabulary.special
    assert tokenizer.token_names["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in (tokenizer.chat_template or "")


def test_control_tokens_in_text_stay_text_unless_asked() -> None:
    tokenizer = byte_level_tokenizer()
    text = "hello<|im_end|>"
    plain, special = tokenizer.encode(text), tokenizer.encode(text, special=True)
    assert tokenizer.vocabulary.special.isdisjoint(plain)
    assert special[-1] == 2
    assert tokenizer.decode(plain) == text
    assert tokenizer.decode(special) == "hello"
    assert tokenizer.decode(special, skip_special=False) == text


def test_user_defined_tokens_are_found_in_any_text() -> None:
    tokenizer = byte_level_tokenizer()
    token = tokenizer.vocabulary.tokens.index("<tool_call>")
    assert tokenizer.encode("<tool_call>hello")[0] == token
    assert tokenizer.decode([token]) == "<tool_call>"


@pytest.mark.parametrize(
    ("add_bos", "add_eos", "expected"), [(True, False, [0]), (False, True, [2]), (True, True, [0, 2])]
)
def test_text_is_framed_as_the_file_says(add_bos: bool, add_eos: bool, expected: list[int]) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(add_bos_token=add_bos, add_eos_token=add_eos))
    assert tokenizer.encode("") == expected
    assert tokenizer.encode("", add_bos=False) == []


def test_sentencepiece_adds_a_space_and_takes_it_away() -> None:
    tokenizer = sentencepiece_tokenizer()
    ids = tokenizer.encode("hello world")
    assert [tokenizer.id_to_token(i) for i in ids] == ["<s>", "▁hello", "▁world"]
    assert tokenizer.decode(ids) == "hello world"
    assert tokenizer.decode(ids, continuation=True) == " hello world"
    assert tokenizer.decode(ids, skip_special=False) == "<s> hello world"


def test_sentencepiece_without_the_space_prefix() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece(add_space_prefix=False, add_bos_token=False))
    ids = tokenizer.encode("hello world")
    assert [tokenizer.id_to_token(i) for i in ids] == ["hello", "▁world"]
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"


def test_sentencepiece_falls_back_to_bytes() -> None:
    tokenizer = sentencepiece_tokenizer()
    ids = tokenizer.encode("\n🦙", add_bos=False)
    assert [tokenizer.token_bytes(i) for i in ids] == [b" ", b"\n", b"\xf0", b"\x9f", b"\xa6", b"\x99"]
    assert tokenizer.decode(ids) == "\n🦙"


def test_sentencepiece_user_defined_spaces_match_the_text() -> None:
    changed = sentencepiece(add_space_prefix=False)
    changed["tokenizer.ggml.tokens"][-1] = "▁▁▁"
    changed["tokenizer.ggml.token_type"][-1] = 4
    tokenizer = Tokenizer.from_gguf(changed)
    ids = tokenizer.encode("a   b", add_bos=False)
    assert [tokenizer.token_bytes(i) for i in ids] == [b"a", b"   ", b"b"]


@pytest.mark.parametrize("text", ["half \ud800 pair", "\udfff"])
def test_half_surrogates_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        byte_level_tokenizer().encode(text)


def test_only_strings_are_encoded() -> None:
    with pytest.raises(InvalidRequest, match="must be a string, not int"):
        byte_level_tokenizer().encode(5)


@pytest.mark.parametrize("make", [byte_level_tokenizer, sentencepiece_tokenizer])
def test_ids_that_stand_for_nothing(make: Callable[[], Tokenizer]) -> None:
    made = make()
    for token_id in (-1, made.vocab_size, 2**40):
        assert made.token_bytes(token_id) == b""
        assert made.id_to_token(token_id) is None
        assert made.decode([token_id]) == ""


@given(st.text(max_size=40))
@settings(max_examples=150, deadline=None)
def test_any_text_survives(text: str) -> None:
    for tokenizer in (byte_level_tokenizer(), sentencepiece_tokenizer()):
        space = " " if tokenizer.vocabulary.style == "spm" else "▁"  # SentencePiece cannot tell the two apart
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace("▁", space)


# ── comparing vocabularies ──


def test_same_vocabulary() -> None:
    one, other = byte_level_tokenizer(), Tokenizer.from_gguf(byte_level())
    assert one.same_vocabulary(other) is None
    assert one.vocabulary_fingerprint() == other.vocabulary_fingerprint()


def test_padding_does_not_make_a_vocabulary_another() -> None:
    padded = byte_level()
    padded["tokenizer.ggml.tokens"] += ["[PAD1]", "[PAD2]"]
    padded["tokenizer.ggml.token_type"] += [5, 5]
    one, other = byte_level_tokenizer(), Tokenizer.from_gguf(padded)
    assert one.same_vocabulary(other) is None
    assert other.same_vocabulary(one) is None
    assert one.vocabulary_fingerprint() != other.vocabulary_fingerprint()


def test_the_first_difference_is_named() -> None:
    changed = byte_level()
    changed["tokenizer.ggml.tokens"][1] = "<|start|>"
    difference = byte_level_tokenizer().same_vocabulary(Tokenizer.from_gguf(changed))
    assert difference is not None
    assert "token 1 is b'<|im_start|>' in one and b'<|start|>' in the other (1 of" in difference


def test_styles_are_compared_by_bytes() -> None:
    assert byte_level_tokenizer().same_vocabulary(sentencepiece_tokenizer()) is not None
