"""A tokenizer from the `tokenizer.*` metadata of a GGUF file.

Two kinds are built: "gpt2" (byte-level BPE with stored merges) and "llama" (SentencePiece BPE, whose merges follow from
the scores). Control tokens are left out of the encoder's vocabulary, so that no text can ever become one. Metadata is
checked before it is used: the result is complete, or a ModelFileError says what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, models, normalizers

from paceline.errors import ModelFileError, UnsupportedModel
from paceline.text.pretokenizers import pretokenizer
from paceline.text.vocabulary import SPM_SPACE, TokenizerParts, Vocabulary

Metadata = Mapping[str, Any]


class Kind(IntEnum):
    """Kinds of tokens, by their numbers in tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


SPECIAL = frozenset({Kind.UNKNOWN, Kind.CONTROL, Kind.UNUSED})

# Files name one end-of-sequence token; models end a turn with any of these control tokens as well.
ENDS_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")

# Roles in fill-in-the-middle → names of the key of a token's id, the newer first.
FIM_KEYS = {
    "pre": ("fim_pre", "prefix"),
    "suf": ("fim_suf", "suffix"),
    "mid": ("fim_mid", "middle"),
    "pad": ("fim_pad",),
    "rep": ("fim_rep",),
    "sep": ("fim_sep",),
}
_NAMED_IDS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def read_parts(metadata: Metadata) -> TokenizerParts:
    model = _value(metadata, "model", str, default=None)
    if model is None:
        raise ModelFileError("the GGUF file holds no tokenizer (tokenizer.ggml.model is missing); convert it again")
    if model not in ("gpt2", "llama"):
        raise UnsupportedModel(
            f"the GGUF file has a tokenizer of kind {model!r} (tokenizer.ggml.model); known are 'gpt2' and 'llama'. "
            "Load the original model directory (tokenizer.json) instead."
        )
    tokens = _strings(metadata, "tokens")
    kinds = _kinds(metadata, len(tokens))
    _refuse_duplicates(tokens, kinds)
    build = _byte_level if model == "gpt2" else _sentencepiece
    encoder, vocabulary, adds_bos = build(metadata, tokens, kinds)
    return _assemble(metadata, encoder, vocabulary, kinds, adds_bos)


def _assemble(
    metadata: Metadata, encoder: tokenizers.Tokenizer, vocabulary: Vocabulary, kinds: list[int], adds_bos: bool
) -> TokenizerParts:
    size = len(vocabulary)
    ids = {name: _token_id(metadata, name, size) for name in (*_NAMED_IDS, "eot", "eom")}
    bos, eos = ids["bos"], ids["eos"]
    adds_bos = _value(metadata, "add_bos_token", bool, default=adds_bos)
    adds_eos = _value(metadata, "add_eos_token", bool, default=False)
    control = [i for i, kind in enumerate(kinds) if kind in (Kind.CONTROL, Kind.UNKNOWN) and vocabulary.tokens[i]]
    ends = [i for i in control if vocabulary.tokens[i] in ENDS_OF_TURN]
    candidates = (eos, ids["eot"], ids["eom"], *ends)
    return TokenizerParts(
        vocabulary=vocabulary,
        encoder=encoder,
        inner_encoder=encoder,
        control={i: AddedToken(vocabulary.tokens[i], normalized=False, special=True) for i in control},
        prefix=(bos,) if adds_bos and bos is not None else (),
        suffix=(eos,) if adds_eos and eos is not None else (),
        bos_id=bos,
        eos_ids=tuple(dict.fromkeys(i for i in candidates if i is not None)),
        chat_template=_chat_template(metadata),
        names={
            text: vocabulary.tokens[token_id]
            for name, text in _NAMED_IDS.items()
            if (token_id := ids[name]) is not None
        },
        fim_ids=_fim_ids(metadata, size),
    )


# ── byte-level BPE ──


def _byte_level(
    metadata: Metadata, tokens: list[str], kinds: list[int]
) -> tuple[tokenizers.Tokenizer, Vocabulary, bool]:
    pre = pretokenizer(_value(metadata, "pre", str, default="default"))
    vocab = _encodable(tokens, kinds)
    model = models.BPE(vocab, _stored_merges(metadata, vocab), ignore_merges=pre.whole_words)
    encoder = tokenizers.Tokenizer(model)
    encoder.pre_tokenizer = pre.build()
    if normalizer := pre.normalizer():
        encoder.normalizer = normalizer
    user_defined = [i for i, kind in enumerate(kinds) if kind == Kind.USER_DEFINED]
    _add_user_defined(encoder, (tokens[i] for i in user_defined))
    special = frozenset(i for i, kind in enumerate(kinds) if kind in SPECIAL)
    vocabulary = Vocabulary(tuple(tokens), special, literal=special.union(user_defined), style="bytes")
    return encoder, vocabulary, pre.adds_bos


def _stored_merges(metadata: Metadata, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    lines = _strings(metadata, "merges")
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines)]
    for rank, (left, right) in enumerate(merges):
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelFileError(
                f"tokenizer.ggml.merges[{rank}] is {lines[rank]!r}, whose parts or result are no tokens of the file; "
                "the file is damaged or was converted wrongly"
            )
    return merges


# ── SentencePiece BPE ──


def _sentencepiece(
    metadata: Metadata, tokens: list[str], kinds: list[int]
) -> tuple[tokenizers.Tokenizer, Vocabulary, bool]:
    add_space = _value(metadata, "add_space_prefix", bool, default=True)
    user_defined = [i for i, kind in enumerate(kinds) if kind == Kind.USER_DEFINED]
    for i in user_defined:  # matched in the text before its spaces are rewritten
        tokens[i] = tokens[i].replace(SPM_SPACE, " ")
    vocab = _encodable(tokens, kinds)
    unknown = _token_id(metadata, "unknown", len(tokens))
    unk_token = None if unknown is None else tokens[unknown]
    if unknown is not None and unk_token:
        vocab.setdefault(unk_token, unknown)
    model = models.BPE(
        vocab, _scored_merges(metadata, tokens, kinds), unk_token=unk_token or None, fuse_unk=True, byte_fallback=True
    )
    encoder = tokenizers.Tokenizer(model)
    replace = normalizers.Replace(" ", SPM_SPACE)
    encoder.normalizer = normalizers.Sequence([normalizers.Prepend(SPM_SPACE), replace]) if add_space else replace
    _add_user_defined(encoder, (tokens[i] for i in user_defined))
    special = frozenset(i for i, kind in enumerate(kinds) if kind in SPECIAL)
    literal = special.union(user_defined)
    return encoder, Vocabulary(tuple(tokens), special, literal, style="spm", leading_space=add_space), True


def _scored_merges(metadata: Metadata, tokens: list[str], kinds: list[int]) -> list[tuple[str, str]]:
    """Make merges from scores: each split of a token into two tokens is one, tokens of a better score first."""
    scores = _numbers(metadata, "scores", len(tokens))
    normal = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == Kind.NORMAL}
    order = sorted(normal.values(), key=lambda i: -scores[i])
    return [pair for i in order for pair in _splits(tokens[i], normal)]


def _splits(token: str, normal: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
    known = [(left, right) for left, right in pairs if left in normal and right in normal]
    yield from sorted(known, key=lambda pair: (normal[pair[0]], normal[pair[1]]))


# ── shared ──


def _encodable(tokens: list[str], kinds: list[int]) -> dict[str, int]:
    """Map texts to ids for all tokens that text may become. Of two with the same text the first counts."""
    vocab: dict[str, int] = {}
    for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind not in SPECIAL:
            vocab.setdefault(token, i)
    return vocab


def _add_user_defined(encoder: tokenizers.Tokenizer, texts: Iterator[str]) -> None:
    encoder.add_tokens([AddedToken(text, normalized=False, special=False) for text in texts if text])


def _refuse_duplicates(tokens: list[str], kinds: list[int]) -> None:
    normal = [token for token, kind in zip(tokens, kinds, strict=True) if kind == Kind.NORMAL]
    if len(set(normal)) == len(normal):
        return
    seen: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if kinds[i] == Kind.NORMAL and seen.setdefault(token, i) != i:
            raise ModelFileError(
                f"tokenizer.ggml.tokens holds {token!r} twice, as {seen[token]} and {i}; ids must differ"
            )


# ── reading metadata ──


def _value(metadata: Metadata, name: str, kind: type, default: Any) -> Any:
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key, default)
    if value is default:
        return default
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ModelFileError(f"{key} must be {kind.__name__}, not {type(value).__name__}: {value!r:.60}")
    return value


def _list(metadata: Metadata, name: str) -> Sequence[Any] | None:
    key = f"tokenizer.ggml.{name}"
    values = metadata.get(key)
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if values is not None and not isinstance(values, list | tuple):
        raise ModelFileError(f"{key} must be an array, not {type(values).__name__}")
    return values


def _strings(metadata: Metadata, name: str) -> list[str]:
    values = _list(metadata, name)
    if not values:
        raise ModelFileError(f"tokenizer.ggml.{name} is missing or empty; the file is incomplete")
    try:  # all at once: a vocabulary has hundreds of thousands of tokens
        "".join(values).encode()
        return list(values)
    except (TypeError, UnicodeError):  # one of them is bytes or bad: find it
        return [_string(value, f"tokenizer.ggml.{name}[{i}]") for i, value in enumerate(values)]


def _string(value: Any, where: str) -> str:
    try:
        text = value.decode() if isinstance(value, bytes) else value
        if not isinstance(text, str):
            raise ModelFileError(f"{where} must be a string, not {type(value).__name__}")
        text.encode()
    except UnicodeError:
        raise ModelFileError(f"{where} is not valid UTF-8: {value!r:.60}") from None
    return text


def _numbers(metadata: Metadata, name: str, size: int) -> list[float]:
    values = _list(metadata, name)
    if values is None:
        raise ModelFileError(f"tokenizer.ggml.{name} is missing; the file is incomplete")
    if len(values) != size:
        raise ModelFileError(f"tokenizer.ggml.{name} holds {len(values)} values for {size} tokens; they must agree")
    if not all(isinstance(value, int | float) and value == value for value in values):
        raise ModelFileError(f"tokenizer.ggml.{name} must hold numbers only, none of them NaN")
    return list(values)


def _kinds(metadata: Metadata, size: int) -> list[int]:
    if _list(metadata, "token_type") is None:
        return [Kind.NORMAL] * size
    kinds = _numbers(metadata, "token_type", size)
    known = frozenset(Kind)
    if not known.issuperset(kinds):
        i, kind = next((i, kind) for i, kind in enumerate(kinds) if kind not in known)
        raise ModelFileError(f"tokenizer.ggml.token_type[{i}] is {kind}; known kinds are 1 to 6")
    return [int(kind) for kind in kinds]


def _token_id(metadata: Metadata, name: str, size: int) -> int | None:
    token_id: int | None = _value(metadata, f"{name}_token_id", int, default=None)
    if token_id in (-1, 0xFFFFFFFF):  # how some converters write "none"
        return None
    if token_id is not None and not 0 <= token_id < size:
        raise ModelFileError(f"tokenizer.ggml.{name}_token_id is {token_id}; the file has tokens 0 to {size - 1}")
    return token_id


def _fim_ids(metadata: Metadata, size: int) -> dict[str, int]:
    pairs = ((role, _token_id(metadata, key, size)) for role, keys in FIM_KEYS.items() for key in reversed(keys))
    return {role: token_id for role, token_id in pairs if token_id is not None}


def _chat_template(metadata: Metadata) -> str | None:
    template = metadata.get("tokenizer.chat_template")
    return None if template is None else _string(template, "tokenizer.chat_template")
