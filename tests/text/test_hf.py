from __future__ import annotations

import contextlib
import copy
import functools
import json
import operator
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, processors
from transformers import AutoTokenizer

from paceline.chat.template import ChatTemplate
from paceline.errors import ModelError, ModelFileError, UnsupportedModel
from paceline.text.tokenizer import Tokenizer
from tests.text.vocabularies import CHAT, byte_level_json, byte_level_tokenizer, save, sentencepiece_json

TEXTS = ["", "hello world", " hello", "  two  spaces ", "a\nb\t", "é 🦙 naïve", "<tool_call>hello</s>", "x<|im_end|>y"]
BYTE_LEVEL_CONFIG = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "chat_template": CHAT}
SPM_CONFIG = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, "unk_token": "<unk>"}
SPM_CHAT = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}</s> {% endfor %}"


@pytest.fixture
def byte_level(tmp_path: Path) -> Path:
    return save(tmp_path, byte_level_json(), **BYTE_LEVEL_CONFIG)


def write(path: Path, name: str, value: Any) -> None:
    (path / name).write_text(value if isinstance(value, str) else json.dumps(value))


# ── the same ids as transformers ──


@pytest.mark.parametrize("config", [{}, {"add_bos_token": False}])
def test_byte_level_parity(tmp_path: Path, config: dict[str, Any]) -> None:
    path = save(tmp_path, byte_level_json(), **BYTE_LEVEL_CONFIG, **config)
    ours, theirs = Tokenizer.from_directory(path), AutoTokenizer.from_pretrained(path)
    for text in TEXTS:
        framed = f"<|im_start|>{text}<|im_end|> {text}"
        assert ours.encode(text) == theirs(text, split_special_tokens=True).input_ids
        assert ours.encode(framed, special=True, add_bos=False) == theirs(framed, add_special_tokens=False).input_ids


@pytest.mark.parametrize("scheme", ["legacy", "first", "always", "never"])
def test_sentencepiece_parity(tmp_path: Path, scheme: str) -> None:
    path = save(tmp_path, sentencepiece_json(scheme), **SPM_CONFIG, chat_template=SPM_CHAT)
    ours, theirs = Tokenizer.from_directory(path), AutoTokenizer.from_pretrained(path)
    template = ChatTemplate(ours)
    for text in TEXTS[:-2]:
        framed = f"<s>{text}</s> {text}<s>{text}"
        assert ours.encode(text) == theirs(text).input_ids
        assert ours.encode(framed, special=True) == theirs(framed).input_ids
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text).input_ids, skip_special_tokens=True)
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
        assert template.encode(messages) == theirs.apply_chat_template(messages, return_dict=False)


def test_a_directory_and_a_gguf_file_agree(byte_level: Path) -> None:
    tokenizer = Tokenizer.from_directory(byte_level)
    assert tokenizer.same_vocabulary(byte_level_tokenizer()) is None
    assert tokenizer.vocabulary.special == byte_level_tokenizer().vocabulary.special
    assert [tokenizer.encode(text) for text in TEXTS] == [byte_level_tokenizer().encode(text) for text in TEXTS]


def test_control_tokens_may_swallow_space(tmp_path: Path) -> None:
    made = byte_level_json()
    made.add_special_tokens([_stripping("<|user|>")])
    path = save(tmp_path, made, **BYTE_LEVEL_CONFIG)
    ours, theirs = Tokenizer.from_directory(path), AutoTokenizer.from_pretrained(path)
    text = "hello <|user|> \n world"
    assert ours.encode(text, special=True) == theirs(text).input_ids
    assert ours.decode(ours.encode(text, special=True)) == "helloworld"


def _stripping(text: str) -> Any:
    return AddedToken(text, normalized=False, special=True, lstrip=True, rstrip=True)


# ── bos, eos, template ──


def test_tokenizer_json_decides_on_bos_where_it_says_something(tmp_path: Path) -> None:
    path = save(tmp_path, sentencepiece_json("legacy"), **SPM_CONFIG, add_bos_token=False)
    assert Tokenizer.from_directory(path).encode("") == AutoTokenizer.from_pretrained(path)("").input_ids == [1]


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        (processors.TemplateProcessing(single="$A", special_tokens=[]), []),
        (processors.TemplateProcessing(single="x y $A x", special_tokens=[("x", 1), ("y", 2)]), [1, 2, 1]),
        (processors.Sequence([processors.ByteLevel(), processors.BertProcessing(("s", 2), ("c", 1))]), [1, 2]),
        (processors.ByteLevel(), []),
    ],
)
def test_what_post_processors_add(tmp_path: Path, processor: Any, expected: list[int]) -> None:
    made = byte_level_json()
    made.post_processor = processor
    path = save(tmp_path, made)
    assert Tokenizer.from_directory(path).encode("") == AutoTokenizer.from_pretrained(path)("").input_ids == expected


def test_a_post_processor_with_a_token_it_does_not_define(tmp_path: Path) -> None:
    path = save(tmp_path, sentencepiece_json("legacy"))
    content = json.loads((path / "tokenizer.json").read_text())
    content["post_processor"]["special_tokens"] = {}
    write(path, "tokenizer.json", content)
    with pytest.raises(ModelFileError, match="uses '<s>', which it does not define"):
        Tokenizer.from_directory(path)


def test_tokenizer_config_decides_on_bos_otherwise(tmp_path: Path) -> None:
    path = save(tmp_path, byte_level_json(), **BYTE_LEVEL_CONFIG, add_bos_token=True)
    assert Tokenizer.from_directory(path).encode("") == [0]


def test_eos_ids_come_from_the_generation_config(byte_level: Path) -> None:
    assert Tokenizer.from_directory(byte_level).eos_ids == (2,)
    write(byte_level, "config.json", {"eos_token_id": 1})
    assert Tokenizer.from_directory(byte_level).eos_ids == (2, 1)
    write(byte_level, "generation_config.json", {"eos_token_id": [2, 0]})
    assert Tokenizer.from_directory(byte_level).eos_ids == (2, 0)


def test_chat_template_files_come_first(byte_level: Path) -> None:
    assert Tokenizer.from_directory(byte_level).chat_template == CHAT
    write(byte_level, "chat_template.json", {"chat_template": "json"})
    assert Tokenizer.from_directory(byte_level).chat_template == "json"
    write(byte_level, "chat_template.jinja", "jinja")
    assert Tokenizer.from_directory(byte_level).chat_template == "jinja"


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    path = save(tmp_path, byte_level_json(), chat_template=several)
    assert Tokenizer.from_directory(path).chat_template == "d"


def test_named_tokens_are_special_even_where_tokenizer_json_is_silent(tmp_path: Path) -> None:
    path = save(tmp_path, byte_level_json(), eos_token="hello")
    tokenizer = Tokenizer.from_directory(path)
    assert tokenizer.encode("hello", special=True) == list(tokenizer.eos_ids)
    assert tokenizer.decode(tokenizer.eos_ids) == ""


def test_tokens_only_the_config_names_are_added(tmp_path: Path) -> None:
    size = byte_level_json().get_vocab_size()
    listed = {str(size): {"content": "<|extra|>", "special": True}, "0": {"content": "<|endoftext|>"}}
    tokenizer = Tokenizer.from_directory(save(tmp_path, byte_level_json(), added_tokens_decoder=listed))
    assert tokenizer.encode("<|extra|>", special=True) == [size]
    assert size in tokenizer.vocabulary.special


# ── damaged directories ──


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "cannot be read as a tokenizer"),
        ("tokenizer.json", "[]", "cannot be read as a tokenizer"),
        ("tokenizer_config.json", "{", "is not valid JSON"),
        ("tokenizer_config.json", "[" * 100_000, "is not valid JSON"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
        ("tokenizer_config.json", {"eos_token": "<none>"}, "names '<none>' as eos_token"),
        ("tokenizer_config.json", {"eos_token": 5}, "eos_token in tokenizer_config.json must be a string"),
        ("tokenizer_config.json", {"added_tokens_decoder": []}, "must map ids to tokens"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": "a"}}, "which is no number"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"7": {"content": "hello"}}}, "calls token 7 'hello'"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9999": {"content": "<|x|>"}}}, "calls token 9999"),
        ("tokenizer_config.json", {"chat_template": 5}, "must be a string, not int"),
        ("generation_config.json", {"eos_token_id": "x"}, "must be an id or a list of ids"),
        ("generation_config.json", {"eos_token_id": [True]}, "must be an id or a list of ids"),
    ],
)
def test_damaged_files_are_named(byte_level: Path, name: str, content: Any, message: str) -> None:
    write(byte_level, name, content)
    with pytest.raises(ModelFileError, match=message):
        Tokenizer.from_directory(byte_level)


def test_files_that_are_no_utf8(byte_level: Path) -> None:
    (byte_level / "chat_template.jinja").write_bytes(b"abc\xff")
    with pytest.raises(ModelFileError, match="not valid UTF-8 at byte 3"):
        Tokenizer.from_directory(byte_level)


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"has no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


def test_other_models_than_bpe_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path, tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(UnsupportedModel, match="of kind WordLevel"):
        Tokenizer.from_directory(path)


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}])
def test_unknown_decoders_are_refused(byte_level: Path, decoder: Any) -> None:
    content = json.loads((byte_level / "tokenizer.json").read_text())
    write(byte_level, "tokenizer.json", {**content, "decoder": decoder})
    with pytest.raises(UnsupportedModel, match="decodes by"):
        Tokenizer.from_directory(byte_level)


@pytest.mark.parametrize("token_id", [10**8, 2**32 - 1])
def test_ids_beyond_any_vocabulary_are_refused(byte_level: Path, token_id: int) -> None:
    content = json.loads((byte_level / "tokenizer.json").read_text())
    content["model"]["vocab"]["zzz"] = token_id
    write(byte_level, "tokenizer.json", content)
    with pytest.raises(ModelError, match="ids up to"):
        Tokenizer.from_directory(byte_level)


# ── any damage ──

Place = tuple[str | int, ...]


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield (*place, key)
        yield from places(item, (*place, key))


BASES = [
    json.loads(made.to_str()) for made in (byte_level_json(), sentencepiece_json("first"), sentencepiece_json("legacy"))
]
PLACES = [[place for place in places(base) if place[:2] != ("model", "vocab")] for base in BASES]
VALUES: list[Any] = [None, True, 0, -1, 2**31, 2**64, 1.5, "", "x", "\x00", "(", [], {}, [[]], {"type": "Sequence"}]


@given(st.integers(0, 2), st.lists(st.tuples(st.integers(0), st.sampled_from(VALUES)), min_size=1, max_size=3))
@settings(max_examples=150, deadline=None)
def test_damaged_tokenizers_load_whole_or_not_at_all(kind: int, damage: list[tuple[int, Any]]) -> None:
    content = copy.deepcopy(BASES[kind])
    for at, value in damage:
        *path, last = PLACES[kind][at % len(PLACES[kind])]
        with contextlib.suppress(KeyError, IndexError, TypeError):  # an earlier change took the place away
            functools.reduce(operator.getitem, path, content)[last] = value
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), "tokenizer.json", content)
        try:
            tokenizer = Tokenizer.from_directory(folder)
        except ModelError:
            return
    ids = tokenizer.encode("hello <|im_end|> wörld", special=True)
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    tokenizer.decode(range(tokenizer.vocab_size), skip_special=False)
