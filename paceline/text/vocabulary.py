"""The tokens of a model: their text, their bytes, and which of them are control tokens.

A Vocabulary knows nothing of encoding. It holds one entry for each id, from 0 to the largest known id. An id that a
model pads its embedding with, or that no file names, has no bytes.

Two styles of writing a token down exist, and `token_bytes` undoes both:

    bytes    byte-level BPE: every byte is one printable character ("Ġthe" is b" the")
    spm      SentencePiece: "▁the" is b" the", and "<0x0A>" is the byte 10
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import tokenizers

SPM_SPACE = "▁"
Style = Literal["bytes", "spm"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class _ByteLevelMap(dict[int, str]):
    """Maps a printable character to the latin-1 character of its byte, for `str.translate`."""

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        hidden = [byte for byte in range(256) if byte not in set(printable)]
        super().__init__({byte: chr(byte) for byte in printable})
        self.update({256 + rank: chr(byte) for rank, byte in enumerate(hidden)})

    def __missing__(self, _: int) -> str:
        return "\uffff"  # has no latin-1 encoding, so `_byte_level_bytes` takes such a token as plain text


BYTE_LEVEL = _ByteLevelMap()


@dataclass(frozen=True, eq=False)
class Vocabulary:
    tokens: tuple[str, ...]  # as the file writes them; "" where no token has this id
    special: frozenset[int]  # control tokens, never part of the text
    literal: frozenset[int]  # tokens that files of either style write as plain text: control and added tokens
    style: Style
    leading_space: bool = False  # encoding puts a space before the text, and decoding takes it away

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def token_bytes(self) -> list[bytes]:
        one = _byte_level_bytes if self.style == "bytes" else _spm_bytes
        table = [one(token) for token in self.tokens]
        for token_id in self.literal:
            table[token_id] = self.tokens[token_id].encode()
        return table

    @cached_property
    def text_bytes(self) -> list[bytes]:
        """The bytes that each token adds to a text: `token_bytes`, but none for control tokens."""
        table = list(self.token_bytes)
        for token_id in self.special:
            table[token_id] = b""
        return table

    @cached_property
    def ids_by_bytes(self) -> dict[bytes, int]:
        """The token of each text. Of several with the same bytes, one that is no byte token ("<0x0A>") goes first."""
        found: dict[bytes, int] = {}
        for token_id, data in enumerate(self.text_bytes):
            if data and (data not in found or self._is_byte_token(found[data])):
                found[data] = token_id
        return found

    def _is_byte_token(self, token_id: int) -> bool:
        return self.style == "spm" and _BYTE_TOKEN.fullmatch(self.tokens[token_id]) is not None

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for token in self.token_bytes:
            digest.update(len(token).to_bytes(4, "little") + token)
        return digest.hexdigest()

    def difference(self, other: Vocabulary) -> str | None:
        """Say which token differs from the one of the same id in `other`; None: all shared ids mean the same."""
        shared = min(len(self), len(other))
        if self.token_bytes[:shared] == other.token_bytes[:shared]:
            return None
        first = next(i for i in range(shared) if self.token_bytes[i] != other.token_bytes[i])
        count = sum(a != b for a, b in zip(self.token_bytes, other.token_bytes, strict=False))
        return (
            f"token {first} is {self.token_bytes[first]!r} in one and {other.token_bytes[first]!r} in the other"
            f" ({count} of {shared} shared ids differ)"
        )


def _byte_level_bytes(token: str) -> bytes:
    try:
        return token.translate(BYTE_LEVEL).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def _spm_bytes(token: str) -> bytes:
    if token.startswith("<0x") and (match := _BYTE_TOKEN.fullmatch(token)):
        return bytes([int(match[1], 16)])
    return token.replace(SPM_SPACE, " ").encode()


@dataclass(frozen=True)
class TokenizerParts:
    """The parts of a tokenizer, in one form for all file formats."""

    vocabulary: Vocabulary
    encoder: tokenizers.Tokenizer  # text -> ids, never a control token
    inner_encoder: tokenizers.Tokenizer  # as `encoder`, for text that follows a control token
    control: dict[int, tokenizers.AddedToken]  # control tokens, which encoding with `special=True` looks for
    prefix: tuple[int, ...]  # ids that the model expects before any text
    suffix: tuple[int, ...]  # ids that the model expects after any text
    bos_id: int | None
    eos_ids: tuple[int, ...]  # the token that files name as eos, then all others that end an answer
    chat_template: str | None
    names: dict[str, str]  # "bos_token" -> its text, as chat templates want it
    fim_ids: Mapping[str, int] = field(default_factory=dict)  # of pre, suf, mid, pad, rep, sep, if a file has them
