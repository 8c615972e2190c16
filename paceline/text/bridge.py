"""A bridge between two vocabularies: the same text in the tokens of a target and in those of a drafter.

    target    " spec" "ulative" ".\\n\\n"          tokens are compared by the bytes that they stand for
    drafter   " speculative" "." "\\n\\n"          a space begins a new word, unless white space stands before it

A word whose tokens are those that its own encoder gives is translated as text: the other encoder writes it. Any other
word is translated token by token: to the token of the same bytes, else to the other encoding of its bytes. Bytes that
are no whole characters are spelled with the longest tokens that fit. The translation of a token or a usual word has its
bytes; a token that cannot be written has none, and the text goes on without it.

Control tokens never become text, and text never becomes one. They are paired by name, then by role (bos, eos); those
without a partner have no translation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from paceline.text.tokenizer import Tokenizer

MAX_WORD_TOKENS = 32  # a longer word, as of a script without spaces, is cut
MAX_KNOWN_WORDS = 1 << 16  # translations that are kept
SPACES = b" \t\r\n\v\f"

Ids = tuple[int, ...]


class VocabularyBridge:
    """Both directions between a target and a drafter."""

    def __init__(self, target: Tokenizer, drafter: Tokenizer) -> None:
        pairs = pair_control(drafter, target)
        self.target, self.drafter = target, drafter
        self.to_target = OneWay(drafter, target, pairs)
        self.to_drafter = OneWay(target, drafter, pair_control(target, drafter))

    @property
    def common(self) -> int:
        """Number of tokens of the target that the drafter has, too; control tokens do not count."""
        return len(self.to_drafter.same)

    @property
    def share(self) -> float:
        """Part of the target's tokens that the drafter has."""
        texts = sum(map(bool, self.target.vocabulary.text_bytes))
        return self.common / texts if texts else 0.0

    def share_of(self, texts: Iterable[str]) -> float:
        """Return the part of the tokens of these texts that the drafter has."""
        ids = [token for text in texts for token in self.target.encode(text, add_bos=False)]
        return sum(token in self.to_drafter.same for token in ids) / len(ids) if ids else 0.0


class OneWay:
    """Translates tokens of one vocabulary into those of another."""

    def __init__(self, source: Tokenizer, into: Tokenizer, control: Mapping[int, int]) -> None:
        self._source, self._into = source, into
        self._control = control
        self._bytes = source.vocabulary.text_bytes
        by_bytes = into.vocabulary.ids_by_bytes
        self.same = {token: by_bytes[data] for token, data in enumerate(self._bytes) if data in by_bytes}
        self._known: dict[Ids, Ids] = {}

    def token(self, token: int) -> Ids:
        """Translate a single token; nothing where the other vocabulary cannot write it."""
        if token in self.same:
            return (self.same[token],)
        if token in self._control:
            return (self._control[token],)
        return self._written(self._bytes[token]) if 0 <= token < len(self._bytes) else ()

    def word(self, tokens: Ids) -> Ids:
        """Translate a word."""
        found = self._known.get(tokens)
        if found is None:
            found = self._translated(tokens)
            if len(self._known) >= MAX_KNOWN_WORDS:
                self._known.clear()
            self._known[tokens] = found
        return found

    def text(self, tokens: Sequence[int]) -> list[int]:
        """Translate a text, word by word."""
        found: list[int] = []
        word: list[int] = []
        for token in tokens:
            if self.ends(word, token):
                found += self.word(tuple(word))
                word = []
            word.append(token)
        return [*found, *self.word(tuple(word))]

    def ends(self, word: Sequence[int], token: int) -> bool:
        """Tell whether a word is over because `token` follows it."""
        if not word or len(word) >= MAX_WORD_TOKENS:
            return bool(word)
        before, after = self._bytes_of(word[-1]), self._bytes_of(token)
        if not before or not after:  # control tokens, and ids without a token
            return True
        return after[0] == SPACES[0] and after[1:2].strip(SPACES) != b"" and before[-1] not in SPACES

    def _bytes_of(self, token: int) -> bytes:
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""

    def _translated(self, tokens: Ids) -> Ids:
        text = _decoded(b"".join(map(self._bytes_of, tokens))) if len(tokens) > 1 else None
        usual = text and tuple(self._source.encode_piece(text)) == tokens
        ids = self._encoded(text) if text and usual else ()
        return ids or tuple(each for token in tokens for each in self.token(token))

    def _written(self, data: bytes) -> Ids:
        text = _decoded(data)
        return (self._encoded(text) if text else ()) or self._spelled(data)

    def _encoded(self, text: str) -> Ids:
        """Encode a text; nothing if its tokens have other bytes, as those of unknown characters do."""
        ids, table = tuple(self._into.encode_piece(text)), self._into.vocabulary.text_bytes
        return ids if b"".join([table[token] for token in ids]) == text.encode() else ()

    def _spelled(self, data: bytes) -> Ids:
        """Write bytes with the longest tokens that fit, one after the other; nothing if some byte has none."""
        found: list[int] = []
        by_bytes, place = self._into.vocabulary.ids_by_bytes, 0
        while place < len(data):
            ends = range(min(len(data), place + self._longest), place, -1)
            end = next((end for end in ends if data[place:end] in by_bytes), None)
            if end is None:
                return ()
            found.append(by_bytes[data[place:end]])
            place = end
        return tuple(found)

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._into.vocabulary.ids_by_bytes), default=0)


def pair_control(one: Tokenizer, other: Tokenizer) -> dict[int, int]:
    """Pair control tokens: those of one name, then those of one role."""
    theirs = {other.vocabulary.tokens[token]: token for token in sorted(other.vocabulary.special, reverse=True)}
    names = ((token, one.vocabulary.tokens[token]) for token in one.vocabulary.special)
    pairs = {token: theirs[name] for token, name in names if name and name in theirs}
    for mine, partners in ((one.eos_ids, other.eos_ids), ([one.bos_id], [other.bos_id])):
        for token in mine:
            if token is not None and partners and partners[0] is not None:
                pairs.setdefault(token, partners[0])
    return pairs


def _decoded(data: bytes) -> str | None:
    """Decode whole characters; None: some are broken."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
