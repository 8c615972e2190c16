"""The shield against control tokens, over long messages: rounds of search, counted."""

from __future__ import annotations

import pytest

from paceline.chat.shield import PART_CHARACTERS, Shield, swapped
from paceline.text.tokenizer import Span, Tokenizer
from tests.text.vocabularies import BYTES, byte_level


def words_as_control_tokens() -> Tokenizer:
    tokens = ["PAD", "END", *BYTES, "ab"]
    kinds = [3, 3, *[1] * 257]
    return Tokenizer.from_gguf(byte_level(tokens=tokens, token_type=kinds, merges=["a b"], eos_token_id=1))


def test_many_control_tokens_in_a_message_take_as_many_rounds_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, rounds = words_as_control_tokens(), 0
    find = Tokenizer.find_control

    def counted(self: Tokenizer, text: str) -> list[Span]:
        nonlocal rounds
        rounds += 1
        return find(self, text)

    monkeypatch.setattr(Tokenizer, "find_control", counted)
    shield = Shield(tokenizer, "", literals=())
    hidden, back = shield.hide({"messages": [{"content": "PAD or END " * 1000}]})
    content = hidden["messages"][0]["content"]
    assert not find(tokenizer, content)
    assert swapped(content, back) == "PAD or END " * 1000
    assert rounds <= 4  # two for the name of the field, two for its text


def test_parts_of_a_text_are_translated_as_the_whole() -> None:
    text = "<a>" * PART_CHARACTERS
    assert swapped(text, {ord("<"): "[", ord(">"): "é"}) == text.replace("<", "[").replace(">", "é")
