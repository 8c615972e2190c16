"""Long texts: how few tokens one can have at least, and where it may be cut so that its slices give the same ids.

Both facts are read from the encoder when a tokenizer is made. Where they do not follow from it, there is no bound and
no cut: such a text is encoded in one piece.

A cut stands before a space between two ASCII letters. Three things together make it safe:

- every known pattern begins a new match there ("a| b"), and no pattern looks back over it;
- no token has a letter before a space, so that no merge reaches over a cut;
- no token that is found in the text before it is cut into words could begin on one side and end on the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import tokenizers

from paceline.text.pretokenizers import KNOWN
from paceline.text.steps import steps
from paceline.text.vocabulary import BYTE_LEVEL, SPM_SPACE, Vocabulary

SLICE_CHARACTERS = 32_768  # a slice ends at the first cut after so many; about 30 ms of work (docs/soak.md)
NFC_CHARACTERS = 4  # no composed character has a longer canonical decomposition

_PATTERNS = frozenset(pattern for known in KNOWN.values() for pattern in known.patterns)
_OVER_A_CUT = {"bytes": re.compile("[A-Za-z][ Ġ]"), "spm": re.compile(f"[A-Za-z][ {SPM_SPACE}]")}  # by style
_KEEPING = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"})  # pre-tokenizers


@dataclass(frozen=True, slots=True)
class LongText:
    """Facts about an encoder that long texts need."""

    longest_token: int | None  # bytes of text that one token stands for at most; None: not known
    longest_control: int | None  # bytes that a control token is written with; None: it takes spaces beside it, too
    dropped: bytes  # bytes that are no token, and leave no trace in the ids
    composes: bool  # the encoder composes characters, so that a text gets shorter
    cuts: bool  # a text may be cut
    puts_space: bool  # the encoder puts a space before every text

    @classmethod
    def of(
        cls, encoder: tokenizers.Tokenizer, vocabulary: Vocabulary, control: Iterable[tokenizers.AddedToken] = ()
    ) -> LongText:
        normal = list(steps(encoder.normalizer, "normalizers"))
        words = list(steps(encoder.pre_tokenizer, "pretokenizers"))
        texts = [token for i, token in enumerate(vocabulary.tokens) if i not in vocabulary.special]
        known = all(_is_known_normalizer(step) for step in normal) and all(map(_keeps_text, words))
        dropped = _dropped_bytes(encoder)
        return cls(
            longest_token=_longest(vocabulary, texts) if known and dropped is not None else None,
            longest_control=_longest_control(list(control)),
            dropped=dropped or b"",
            composes=any(step["type"] == "NFC" for step in normal),
            cuts=known
            and _splits_at_cuts(encoder, words)
            and not any(map(_OVER_A_CUT[vocabulary.style].search, texts)),
            puts_space=any(step["type"] == "Prepend" for step in normal),
        )

    def fewest_tokens(self, text: str, *, control: bool = False) -> int:
        """Return a number of tokens that `text` has at least, by its size alone.

        `control`: parts of it may be control tokens."""
        longest = self.longest_token
        if longest is None or (control and self.longest_control is None):
            return 0
        if control:
            longest = max(longest, self.longest_control or 0)
        if self.composes and not text.isascii():
            return 0 if self.dropped else -(-len(text) // (NFC_CHARACTERS * longest))
        data = text.encode()
        return -(-len(data.translate(None, self.dropped) if self.dropped else data) // longest)

    def slices(self, text: str) -> Iterator[tuple[int, str]]:
        """Cut a text. Yield each slice after the place of its end; their ids in a row are those of the whole text."""
        start = 0
        while self.cuts and (cut := _next_cut(text, start + SLICE_CHARACTERS)) is not None:
            yield cut, text[start:cut]
            start = cut + self.puts_space
        if start < len(text):
            yield len(text), text[start:]


def _next_cut(text: str, place: int) -> int | None:
    while (place := text.find(" ", place, -1)) >= 0:
        around = text[place - 1] + text[place + 1]
        if around.isascii() and around.isalpha():
            return place
        place += 1
    return None


def _is_known_normalizer(step: dict[str, object]) -> bool:
    """True for a normalizer that removes no text, but for composing characters."""
    if step["type"] == "Replace":
        return step["pattern"] == {"String": " "} and step["content"] == SPM_SPACE
    return step["type"] == "NFC" or (step["type"] == "Prepend" and step["prepend"] == SPM_SPACE)


def _keeps_text(step: dict[str, object]) -> bool:
    return step["type"] in _KEEPING and step.get("behavior") != "Removed"


def _dropped_bytes(encoder: tokenizers.Tokenizer) -> bytes | None:
    """List the bytes that are no token. None: characters without a token may share one, however many they are."""
    vocab = encoder.get_vocab(with_added_tokens=False)
    if any(step["type"] == "ByteLevel" for step in steps(encoder.pre_tokenizer, "pretokenizers")):
        return "".join(byte for character, byte in BYTE_LEVEL.items() if chr(character) not in vocab).encode("latin-1")
    whole = encoder.model.byte_fallback and all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    return b"" if whole else None


def _longest(vocabulary: Vocabulary, texts: list[str]) -> int:
    """Return the size of the longest token in bytes of text; in SentencePiece style "▁" may be itself or a space."""
    if vocabulary.style == "spm":
        return max((len(text.encode()) for text in texts), default=1) or 1
    return max(map(len, vocabulary.text_bytes), default=1) or 1


def _longest_control(control: list[tokenizers.AddedToken]) -> int | None:
    if any(token.lstrip or token.rstrip for token in control):
        return None
    return max((len(token.content.encode()) for token in control), default=0)


def _splits_at_cuts(encoder: tokenizers.Tokenizer, words: list[dict[str, object]]) -> bool:
    """True if the words of two slices are the words of the whole, and no token is found across a cut."""
    patterns = [step["pattern"] for step in words if step["type"] == "Split"]
    known = all(isinstance(pattern, dict) and pattern.get("Regex") in _PATTERNS for pattern in patterns)
    into_words = bool(patterns) or any(_splits_words(step) for step in words)
    found = [token for token in encoder.get_added_tokens_decoder().values() if not token.special]
    return known and not any(map(_looks_around, found)) and (into_words or not encoder.model.ignore_merges)


def _looks_around(token: tokenizers.AddedToken) -> bool:
    """True for a token that depends on spaces in the text: its own, or those beside it."""
    has_space = " " in token.content or (token.normalized and SPM_SPACE in token.content)
    return has_space or token.lstrip or token.rstrip or token.single_word


def _splits_words(step: dict[str, object]) -> bool:
    return bool(step["use_regex"] if step["type"] == "ByteLevel" else step["type"] == "Metaspace" and step["split"])
