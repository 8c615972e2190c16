from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ModelError, ModelFileError, UnsupportedModel
from paceline.text.pretokenizers import KNOWN
from paceline.text.tokenizer import Tokenizer
from tests.text.vocabularies import byte_level, sentencepiece

SAMPLE = "Hello  WORLDs it's 12345 x=1;\n\n  中文"

# ── how kinds of models cut words ──


def cuts(pre: str, text: str) -> list[str]:
    return [text[start:end] for _, (start, end) in KNOWN[pre].build().pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["Hello", " ", " WORLDs", " it", "'s", " 12345", " x", "=", "1", ";", "\n\n ", " 中文"]),
        ("smollm", ["Hello", " ", " WORLDs", " it", "'s", " ", *"12345", " x", "=", "1", ";", "\n\n ", " 中文"]),
        ("qwen2", ["Hello", " ", " WORLDs", " it", "'s", " ", *"12345", " x", "=", "1", ";\n\n", " ", " 中文"]),
        ("llama-bpe", ["Hello", " ", " WORLDs", " it", "'s", " ", "123", "45", " x", "=", "1", ";\n\n", " ", " 中文"]),
        ("falcon", ["Hello", " ", " WORLDs", " it", "'", "s", " ", "123", "45", " x", "=", "1", ";", "\n\n ", " 中文"]),
        ("gpt-4o", ["Hello", " ", " WORLDs", " it's", " ", "123", "45", " x", "=", "1", ";\n\n", " ", " 中文"]),
        (
            "deepseek-v3",
            ["Hello", " ", " WORLDs", " it", "'s", " ", "123", "45", " x", "=", "1", ";\n\n", "  ", "中文"],
        ),
    ],
)
def test_words_are_cut_as_the_model_learned_them(pre: str, expected: list[str]) -> None:
    assert cuts(pre, SAMPLE) == expected


@pytest.mark.parametrize("pre", sorted(KNOWN))
def test_no_cut_loses_text(pre: str) -> None:
    assert "".join(cuts(pre, SAMPLE)) == SAMPLE
    tokenizer = Tokenizer.from_gguf(byte_level(pre=pre, add_bos_token=False))
    assert tokenizer.decode(tokenizer.encode(SAMPLE)) == SAMPLE


def test_the_kind_decides_on_bos_where_the_file_is_silent() -> None:
    assert Tokenizer.from_gguf(byte_level(pre="llama-bpe")).encode("") == [0]
    assert Tokenizer.from_gguf(byte_level(pre="gpt-2")).encode("") == []


def test_qwen_composes_characters() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(pre="qwen2"))
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "é"


def test_whole_words_need_no_merges() -> None:
    merges = byte_level()["tokenizer.ggml.merges"]
    without = [merge for merge in merges if merge != "hell o"]
    whole = Tokenizer.from_gguf(byte_level(pre="llama-bpe", merges=without, add_bos_token=False))
    merged = Tokenizer.from_gguf(byte_level(pre="gpt-2", merges=without))
    assert len(whole.encode("hello")) == 1
    assert len(merged.encode("hello")) == 2


# ── what ends an answer ──


def test_ends_of_turns_are_found_by_name() -> None:
    assert Tokenizer.from_gguf(byte_level()).eos_ids == (2, 0)
    gemma = Tokenizer.from_gguf(sentencepiece(eot_token_id=5))
    assert gemma.eos_ids == (2, 5, gemma.vocabulary.tokens.index("<end_of_turn>"))


def test_no_special_ids_at_all() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(bos_token_id=-1, eos_token_id=None, add_bos_token=True))
    assert (tokenizer.bos_id, tokenizer.encode("")) == (None, [])


def test_arrays_and_numpy_scalars_are_read() -> None:
    kinds = np.array(byte_level()["tokenizer.ggml.token_type"], dtype=np.int32)
    tokenizer = Tokenizer.from_gguf(
        byte_level(token_type=kinds, eos_token_id=np.uint32(1), add_bos_token=np.bool_(True))
    )
    assert tokenizer.eos_ids[0] == 1
    assert tokenizer.encode("") == [0]


# ── damaged metadata ──


def changed(make: Any, name: str, at: int, value: Any) -> dict[str, Any]:
    made: dict[str, Any] = make()
    values = list(made[f"tokenizer.ggml.{name}"])
    values[at] = value
    return {**made, f"tokenizer.ggml.{name}": values}


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        ({}, "holds no tokenizer"),
        (byte_level(model=7), "model must be str, not int"),
        (byte_level(tokens=None), "tokens is missing or empty"),
        (byte_level(tokens=[]), "tokens is missing or empty"),
        (byte_level(tokens="abc"), "must be an array"),
        (byte_level(token_type=[1, 2]), "holds 2 values for"),
        (changed(byte_level, "token_type", 5, 9), r"token_type\[5\] is 9"),
        (changed(byte_level, "token_type", 5, "x"), "numbers only"),
        (changed(byte_level, "tokens", 5, b"\xff\xfe"), r"tokens\[5\] is not valid UTF-8"),
        (changed(byte_level, "tokens", 5, "\ud800"), r"tokens\[5\] is not valid UTF-8"),
        (changed(byte_level, "tokens", 5, 17), r"tokens\[5\] must be a string"),
        (changed(byte_level, "tokens", 5, "he"), "twice, as 5 and 259"),
        (byte_level(merges=None), "merges is missing"),
        (changed(byte_level, "merges", 0, "h zz"), r"merges\[0\] is 'h zz'"),
        (changed(byte_level, "merges", 1, "hello"), r"merges\[1\] is 'hello'"),
        (changed(byte_level, "merges", 2, "a b"), r"merges\[2\] is 'a b'"),
        (byte_level(bos_token_id=100_000), "bos_token_id is 100000"),
        (byte_level(eos_token_id=-2), "eos_token_id is -2"),
        (byte_level(eos_token_id=True), "eos_token_id must be int"),
        (byte_level(add_bos_token="yes"), "add_bos_token must be bool"),
        ({**byte_level(), "tokenizer.chat_template": 5}, "chat_template must be a string"),
        ({**byte_level(), "tokenizer.chat_template": b"\xff"}, "chat_template is not valid UTF-8"),
        (sentencepiece(scores=None), "scores is missing"),
        (sentencepiece(scores=[1.0]), "scores holds 1 values"),
        (changed(sentencepiece, "scores", 7, float("nan")), "none of them NaN"),
        (sentencepiece(unknown_token_id=10**9), "unknown_token_id"),
    ],
)
def test_damaged_metadata_is_named(damaged: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        Tokenizer.from_gguf(damaged)


def test_unknown_kinds_are_not_guessed() -> None:
    with pytest.raises(UnsupportedModel, match=r"'frobnicate' \(tokenizer.ggml.pre\)"):
        Tokenizer.from_gguf(byte_level(pre="frobnicate"))
    with pytest.raises(UnsupportedModel, match="of kind 'bert'"):
        Tokenizer.from_gguf(byte_level(model="bert"))


_scalar = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 300), st.floats(), st.text(max_size=5), st.binary(max_size=5)
)
_value = st.one_of(_scalar, st.lists(_scalar, max_size=5))


@given(
    base=st.sampled_from([byte_level, sentencepiece]),
    replaced=st.dictionaries(st.sampled_from(sorted({*byte_level(), *sentencepiece()})), _value, max_size=3),
    damage=st.lists(st.tuples(st.sampled_from(["tokens", "token_type", "merges", "scores"]), st.integers(0), _scalar)),
)
@settings(max_examples=120, deadline=None)
def test_damaged_metadata_loads_whole_or_not_at_all(
    base: Any, replaced: dict[str, Any], damage: list[tuple[str, int, Any]]
) -> None:
    made = {**base(), **replaced}
    for name, at, value in damage:
        values = made.get(f"tokenizer.ggml.{name}")
        if isinstance(values, list) and values:
            values = list(values)
            values[at % len(values)] = value
            made[f"tokenizer.ggml.{name}"] = values
    try:
        tokenizer = Tokenizer.from_gguf(made)
    except ModelError:
        return
    ids = tokenizer.encode("hello <|im_end|> 世界", special=True)
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    tokenizer.decode(range(tokenizer.vocab_size), skip_special=False)
