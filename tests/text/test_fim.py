"""Fill-in-the-middle: tokens of every family are found, and prompts have their order and fit their room."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import InvalidRequest
from paceline.text.fim import FAMILIES, FimTokens, find_fim_tokens
from paceline.text.tokenizer import Tokenizer
from tests.tiny_models import tiny_tokenizer

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", "<|fim_pad|>")
LETTERS = [chr(ord("a") + i) for i in range(26)]


def tokenizer(special: tuple[str, ...], **named: Any) -> Tokenizer:
    """Letters, a line break and a space, behind <eos> and the `special` tokens."""
    tokens = ["<eos>", *special, *LETTERS, "Ġ", "Ċ", "qq"]
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3] * (1 + len(special)) + [1] * 29,
        "merges": ["q q"],
        "eos_token_id": 0,
        **named,
    }
    return Tokenizer.from_gguf({f"tokenizer.ggml.{name}": value for name, value in fields.items()})


def written(by: Tokenizer, tokens: tuple[int, ...]) -> str:
    return by.decode(tokens, skip_special=False)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family[0])
def test_families_are_known_by_their_texts(family: tuple[str, str, str | None]) -> None:
    marks = tuple(text for text in family if text is not None)
    made = tokenizer(marks[::-1])
    prefix, suffix, middle = (text or "" for text in family)
    expected = f"{prefix}ab{suffix}yz{middle}" if middle else f"{suffix}yz{prefix}ab"
    assert written(made, made.fill_in("ab", "yz").prompt) == expected
    assert made.fim is not None
    assert {made.fim.prefix, made.fim.suffix} <= made.fim.ends


def test_ids_of_a_file_go_before_texts() -> None:
    special = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<p>", "<s>", "<m>", "<e>")
    newer = tokenizer(special, fim_pre_token_id=4, fim_suf_token_id=5, fim_mid_token_id=6, fim_pad_token_id=7)
    older = tokenizer(special, prefix_token_id=4, suffix_token_id=5, middle_token_id=6)
    for made in (newer, older):
        assert written(made, made.fill_in("a", "b").prompt) == "<p>a<s>b<m>"
    assert newer.fim is not None
    assert 7 in newer.fim.ends


def test_a_vocabulary_with_half_of_the_tokens_has_none() -> None:
    assert find_fim_tokens(["<|fim_prefix|>", "<|fim_middle|>", "<repo_name>", "<file_sep>"], {}) is None
    with pytest.raises(InvalidRequest, match="no tokens for fill-in-the-middle"):
        tiny_tokenizer().fill_in("a", "b")


def test_text_never_spells_a_mark() -> None:
    made = tokenizer(QWEN)
    assert made.fim is not None
    marks = {made.fim.prefix, made.fim.suffix, made.fim.middle}
    filled = made.fill_in("a<|fim_middle|>", "<|fim_prefix|>b")
    assert [token for token in filled.prompt if token in marks] == [made.fim.prefix, made.fim.suffix, made.fim.middle]
    assert not marks.intersection(filled.behind)


def test_other_files_stand_before_it() -> None:
    made = tokenizer(QWEN)
    filled = made.fill_in("ab", "yz", files=[("f", "cd"), ("g", "ef")])
    assert written(made, filled.prompt) == (
        "<|repo_name|>project\n<|file_sep|>f\ncd\n<|file_sep|>g\nef\n<|file_sep|>current file\n"
        "<|fim_prefix|>ab<|fim_suffix|>yz<|fim_middle|>"
    )
    assert not filled.cut
    plain = tokenizer(QWEN[:3]).fill_in("ab", "yz", files=[("f", "cd")])
    assert written(tokenizer(QWEN[:3]), plain.prompt).startswith("f\ncd\ncurrent file\n<|fim")


MARKS = FimTokens(prefix=100, suffix=101, middle=102, repository=None, separator=None, ends=frozenset())


@pytest.mark.parametrize(
    ("before", "behind", "room", "kept"),
    [
        (4, 4, None, (4, 4)),
        (4, 4, 11, (4, 4)),
        (4, 4, 10, (4, 3)),
        (40, 40, 43, (30, 10)),  # three quarters for the text before
        (40, 2, 43, (38, 2)),  # all room that the other leaves
        (2, 40, 43, (2, 38)),
        (9, 9, 3, (0, 0)),
    ],
)
def test_texts_are_cut_to_their_room(before: int, behind: int, room: int | None, kept: tuple[int, int]) -> None:
    filled = MARKS.prompt(range(before), range(behind), room=room)
    head, tail = kept
    assert filled.prompt == (100, *range(before - head, before), 101, *range(tail), 102)
    assert filled.behind == tuple(range(tail))
    assert filled.cut == (kept != (before, behind))
    assert room is None or len(filled.prompt) <= room


def test_the_first_files_are_cut_before_the_text() -> None:
    files = [[7] * 5, [8] * 5, [9] * 5]
    filled = MARKS.prompt([1, 2], [3, 4], begin=[0], files=files, room=19)
    assert filled.prompt == (0, *files[1], *files[2], 100, 1, 2, 101, 3, 4, 102)
    assert filled.cut


def test_a_long_text_is_not_encoded_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tokenizer(QWEN)
    asked: list[int] = []
    encode = made.encode_inside
    monkeypatch.setattr(made, "encode_inside", lambda text, **_: asked.append(len(text)) or encode(text))
    filled = made.fill_in("a" * 100_000, "b" * 100_000, files=[("f", "c" * 100_000)], room=40)
    assert filled.cut
    assert len(filled.prompt) == 40
    assert sum(asked) < 2000
