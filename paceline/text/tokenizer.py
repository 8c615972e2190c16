"""Tokenizers, from text to token ids and back, for a model directory (tokenizer.json) or a GGUF file.

Text is only ever text: `encode` turns the characters "<|im_end|>" in it into the control token only where the caller
says `special=True`. Decoding goes through one table of bytes, so that it is the same whether ids arrive one by one
(`IncrementalDecoder` in detokenizer.py) or all at once. Chat templates are rendered in chat/template.py.

Decoding differs from Hugging Face's on purpose in three places: spaces are never "cleaned up"; broken UTF-8 in byte
tokens of a SentencePiece vocabulary gives one U+FFFD for each maximal broken part, as in byte-level ones; and at most
one leading space is taken away.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models

from paceline.checks import check_text
from paceline.errors import ContextTooLong, InvalidRequest
from paceline.text import gguf, hf
from paceline.text.fim import MAX_TOKEN_CHARACTERS, FillIn, FimTokens, find_fim_tokens, last_within
from paceline.text.slices import LongText
from paceline.text.steps import without_leading_space
from paceline.text.vocabulary import TokenizerParts, Vocabulary

# A text is encoded on the thread that asks for it: the package's own threads gain nothing for one text, and cause a
# warning where a process forks.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

Span = tuple[int, int, int]
"""(start, end, id) of a control token in a text: text[start:end] is the token and white space that belongs to it."""


class Tokenizer:
    def __init__(self, parts: TokenizerParts) -> None:
        self.vocabulary: Vocabulary = parts.vocabulary
        self.bos_id = parts.bos_id
        self.eos_ids = parts.eos_ids
        self.chat_template = parts.chat_template
        self.token_names = dict(parts.names)
        self._parts = parts
        self._long = LongText.of(parts.encoder, parts.vocabulary, parts.control.values())
        self._finder, self._found_ids = _control_finder(parts.control)

    @classmethod
    def from_directory(cls, path: str | PathLike[str]) -> Tokenizer:
        return cls(hf.read_parts(Path(path)))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        return cls(gguf.read_parts(metadata))

    # ── text -> ids ──

    def encode(self, text: str, *, special: bool = False, add_bos: bool = True, limit: int | None = None) -> list[int]:
        """Encode `text`. `add_bos` frames it as the model's own configuration asks, usually by one token or none.

        `limit`: see `encode_spans`."""
        check_text(text)
        self.check_size(text, limit)
        ids = self.encode_spans(text, self.find_control(text) if special else (), limit=limit)
        return [*self._parts.prefix, *ids, *self._parts.suffix] if add_bos else ids

    def check_size(self, text: str, limit: int | None) -> None:
        """Raise ContextTooLong if `text`, with control tokens or without, has more than `limit` tokens by its size."""
        if limit is not None and (fewest := self._long.fewest_tokens(text, control=True)) > limit:
            raise _too_long(text, f"at least {fewest}", limit)

    def find_control(self, text: str) -> list[Span]:
        """Find the texts of control tokens in `text`; of two that overlap the first one counts, then the longest."""
        [found] = self._finder.encode_batch([text], add_special_tokens=False)
        return [(start, end, self._found_ids[i]) for i, (start, end) in zip(found.ids, found.offsets, strict=True)]

    def encode_spans(self, text: str, spans: Sequence[Span], *, limit: int | None = None) -> list[int]:
        """Encode `text`, in which exactly `spans` are control tokens and all the rest is plain text.

        Raises ContextTooLong as soon as there are more than `limit` ids, by the size of the text or by reading it."""
        if limit is not None and (fewest := self._fewest_tokens(text, spans)) > limit:
            raise _too_long(text, f"at least {fewest}", limit)
        ids: list[int] = []
        for end, piece in self._pieces(text, spans):
            ids += piece
            if limit is not None and len(ids) > limit:
                raise _too_long(text, f"at least {len(ids)}" if end < len(text) else str(len(ids)), limit)
        return ids

    def _fewest_tokens(self, text: str, spans: Sequence[Span]) -> int:
        ends, starts = [0, *(end for _, end, _ in spans)], [*(start for start, _, _ in spans), len(text)]
        plain = (text[end:start] for end, start in zip(ends, starts, strict=True))
        return len(spans) + sum(map(self._long.fewest_tokens, plain))

    def _pieces(self, text: str, spans: Iterable[Span]) -> Iterator[tuple[int, list[int]]]:
        """Yield the ids of `text` piece by piece, each with the place where the piece ends."""
        done = 0
        for start, end, token_id in spans:
            yield from self._plain(text[done:start], first=done == 0, offset=done)
            yield end, [token_id]
            done = end
        yield from self._plain(text[done:], first=done == 0, offset=done)

    def _plain(self, text: str, *, first: bool, offset: int) -> Iterator[tuple[int, list[int]]]:
        encoder = self._parts.encoder if first else self._parts.inner_encoder
        for end, part in self._long.slices(text):
            # A batch of one is encoded without the interpreter lock, so that other threads go on; `encode` keeps it.
            [encoding] = encoder.encode_batch_fast([part], add_special_tokens=False)
            yield offset + end, encoding.ids

    def encode_inside(self, text: str) -> list[int]:
        """Encode plain text as if a control token stood before it."""
        check_text(text)
        return self.encode_spans(f"\n{text}", [(0, 1, 0)])[1:]

    def encode_piece(self, text: str) -> list[int]:
        """Encode plain text in the middle of a text: no space is put before it, and no token frames it."""
        return self._piece_encoder.encode(text, add_special_tokens=False).ids

    @cached_property
    def _piece_encoder(self) -> tokenizers.Tokenizer:
        return without_leading_space(self._parts.inner_encoder)

    # ── fill-in-the-middle ──

    @cached_property
    def fim(self) -> FimTokens | None:
        """Control tokens of fill-in-the-middle; None: the vocabulary has none."""
        return find_fim_tokens(self.vocabulary.tokens, self._parts.fim_ids)

    def fill_in(
        self,
        before: str | Sequence[int],
        behind: str,
        *,
        files: Sequence[tuple[str, str]] = (),
        room: int | None = None,
    ) -> FillIn:
        """Make the prompt that lets the model write the text between `before` and `behind`.

        `files`: names and texts of other files, the nearest last. `room`: tokens that the prompt may have; what does
        not fit is cut. None: nothing is cut."""
        if self.fim is None:
            raise InvalidRequest(
                "this model has no tokens for fill-in-the-middle: ask for a completion without a suffix, or serve a "
                "model that has them, such as Qwen2.5-Coder",
                param="suffix",
            )
        most = None if room is None else room * MAX_TOKEN_CHARACTERS
        if isinstance(before, str):
            text = before if most is None else before[max(0, len(before) - most) :]
            before = self.encode_inside(text)
        suffix = self.encode_inside(behind[:most])
        near = files if most is None else last_within(files, most, lambda file: sum(map(len, file)))
        begin, others = self._project(self.fim, near) if near else (self._parts.prefix, [])
        filled = self.fim.prompt(before, suffix, begin=begin, files=others, room=room)
        return replace(filled, cut=filled.cut or len(near) < len(files))

    def _project(self, fim: FimTokens, files: Sequence[tuple[str, str]]) -> tuple[tuple[int, ...], list[list[int]]]:
        """Encode the beginning of a prompt with other files, and these files, each behind its name. The last item is
        the name of the file in which the middle is, which clients do not tell."""
        mark = [] if fim.separator is None else [fim.separator]
        texts = [f"{name}\n{text}\n" for name, text in files] + ["current file\n"]
        head = () if fim.repository is None else (fim.repository, *self.encode_inside("project\n"))
        return (*self._parts.prefix, *head), [[*mark, *self.encode_inside(text)] for text in texts]

    # ── ids -> text ──

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, continuation: bool = False) -> str:
        """Decode `ids`; a `continuation` of other text keeps the space that a SentencePiece model begins with."""
        table = self.vocabulary.text_bytes if skip_special else self.vocabulary.token_bytes
        size = len(table)
        data = b"".join([table[i] if 0 <= i < size else b"" for i in ids])
        if self.vocabulary.leading_space and not continuation:
            data = data.removeprefix(b" ")
        return data.decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; none for ids that the model's embedding is padded with."""
        table = self.vocabulary.token_bytes
        return table[token_id] if 0 <= token_id < len(table) else b""

    def id_to_token(self, token_id: int) -> str | None:
        """Return a token as the model's file writes it ("Ġthe", "▁the"); None for an id without a token."""
        tokens = self.vocabulary.tokens
        return (tokens[token_id] or None) if 0 <= token_id < len(tokens) else None

    # ── the vocabulary ──

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary)

    @property
    def prefix(self) -> tuple[int, ...]:
        """Tokens that the model expects before any text."""
        return self._parts.prefix

    @property
    def control_texts(self) -> frozenset[str]:
        """The texts of all control tokens, which a user's text must not be able to spell."""
        return frozenset(token.content for token in self._parts.control.values())

    def vocabulary_fingerprint(self) -> str:
        return self.vocabulary.fingerprint

    def same_vocabulary(self, other: Tokenizer) -> str | None:
        """Compare vocabularies. None: each id that both know has the same bytes; else the first difference in words."""
        return self.vocabulary.difference(other.vocabulary)


def _too_long(text: str, tokens: str, limit: int) -> ContextTooLong:
    return ContextTooLong(
        f"the text has {len(text)} characters and {tokens} tokens; the context holds {limit}: shorten it"
    )


def _control_finder(control: Mapping[int, tokenizers.AddedToken]) -> tuple[tokenizers.Tokenizer, Sequence[int]]:
    """Make a tokenizer that finds only control tokens, and list the model's id for each of its own ids."""
    finder = tokenizers.Tokenizer(models.BPE())
    by_text = {token.content: (token_id, token) for token_id, token in sorted(control.items(), reverse=True)}
    finder.add_special_tokens([token for _, token in by_text.values()])
    return finder, [token_id for token_id, _ in by_text.values()]
