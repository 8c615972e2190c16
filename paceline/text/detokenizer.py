"""The text of a growing answer: characters are never cut in half, and stop strings are found across tokens.

    ids ─▶ IncrementalDecoder ─▶ text ─▶ StopChecker ─▶ text that is safe to show

The pieces that `IncrementalDecoder` returns add up to the text that `Tokenizer.decode` gives for all ids at once.
`StopChecker` finds the same however the text was cut into pieces. `TextStream` combines the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from encodings.utf_8 import IncrementalDecoder as Utf8Decoder

from paceline.text.tokenizer import Tokenizer


class IncrementalDecoder:
    """Decodes tokens one by one. `push` returns the text that is complete with a token; bytes that cannot become a
    character any more are U+FFFD.

    With `continuation` the tokens follow other text, and the space that a SentencePiece model begins with is kept.
    """

    __slots__ = ("_at_start", "_decoder", "_size", "_table")

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, continuation: bool = False) -> None:
        vocabulary = tokenizer.vocabulary
        self._table = vocabulary.text_bytes if skip_special else vocabulary.token_bytes
        self._size = len(self._table)
        self._decoder = Utf8Decoder(errors="replace")
        self._at_start = vocabulary.leading_space and not continuation

    def push(self, token_id: int) -> str:
        return self.push_all((token_id,))

    def push_all(self, token_ids: Sequence[int]) -> str:
        table, size = self._table, self._size
        if len(token_ids) == 1:  # the usual case
            data = table[token_ids[0]] if 0 <= token_ids[0] < size else b""
        else:
            data = b"".join([table[token_id] for token_id in token_ids if 0 <= token_id < size])
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        if not self._decoder.buffer and data.isascii():  # the usual case, three times as fast
            return data.decode("ascii")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """End the text: U+FFFD for a character that was never completed, or nothing."""
        return self._decoder.decode(b"", True)


@dataclass(frozen=True)
class StopMatch:
    """A stop string that was found: text[start:end], counted in characters from the beginning of the text."""

    stop: str
    start: int
    end: int


class StopChecker:
    """Finds stop strings in a growing text. It holds back only text that may be the beginning of one.

    The stop string that is complete first wins; of several that end at the same character the longest. Once one has
    matched, nothing follows.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self.match: StopMatch | None = None
        self._stops = sorted(set(stops), key=lambda stop: (-len(stop), stop))
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # how many characters of each stop string the text ends with
        self._starts = frozenset(stop[0] for stop in self._stops)
        self._include = include_stop
        self._seen = 0  # characters pushed
        self._held = ""

    def push(self, text: str) -> str:
        if self.match:
            return ""
        if not self._held and self._starts.isdisjoint(text):
            self._seen += len(text)
            return text
        for offset, character in enumerate(text):
            stop = self._advance(character)
            if stop is not None:
                return self._cut(self._held + text[: offset + 1], stop)
        return self._release(text)

    def skip(self, text: str) -> str:
        """Pass text at the beginning through, without looking for stop strings in it."""
        self._seen += len(text)
        return text

    def flush(self) -> str:
        """Return the text that is still held back, once no more follows."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Take the Knuth-Morris-Pratt step for each stop string; return the longest one that `character` completes."""
        self._seen += 1
        for i, stop in enumerate(self._stops):
            matched, borders = self._matched[i], self._borders[i]
            while matched and stop[matched] != character:
                matched = borders[matched]
            matched += stop[matched] == character
            self._matched[i] = matched
            if matched == len(stop):
                return stop  # the stops are sorted, longest first; the states of the others no longer matter
        return None

    def _cut(self, pending: str, stop: str) -> str:
        self.match = StopMatch(stop=stop, start=self._seen - len(stop), end=self._seen)
        self._held = ""
        return pending if self._include else pending[: -len(stop)]

    def _release(self, text: str) -> str:
        pending = self._held + text
        keep = max(self._matched, default=0)
        safe = len(pending) - keep
        self._held = pending[safe:]
        return pending[:safe]


class TextStream:
    """Turns the tokens of one answer into text to show, up to its first stop string."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        stops_from: int = 0,
        skip_special: bool = True,
        continuation: bool = False,
    ) -> None:
        """Make a stream that looks for stop strings only after the first `stops_from` tokens."""
        self.tokens = 0  # tokens taken so far; the last one completed the stop string, if `match` is set
        self.match: StopMatch | None = None  # the stop string that was found
        self._decoder = IncrementalDecoder(tokenizer, skip_special=skip_special, continuation=continuation)
        self._checker = StopChecker(stops, include_stop=include_stop)
        self._stops_from = stops_from
        self._stops = bool(stops)

    def push(self, token_ids: Sequence[int]) -> str:
        """Take tokens until a stop string is complete, and return their text; later tokens are not taken."""
        if not self._stops:
            self.tokens += len(token_ids)
            return self._decoder.push_all(token_ids)
        text = []
        for token_id in token_ids:
            if self.match:
                break
            self.tokens += 1
            check = self._checker.push if self.tokens > self._stops_from else self._checker.skip
            text.append(check(self._decoder.push(token_id)))
            self.match = self._checker.match
        return "".join(text)

    def flush(self) -> str:
        """Return the rest of the text, once the answer is over. A broken last character can complete a stop string."""
        if self.match:
            return ""
        text = self._checker.push(self._decoder.flush())
        self.match = self._checker.match
        return text + self._checker.flush()


def _borders(stop: str) -> list[int]:
    """borders[n] is the length of the longest proper prefix of stop[:n] that is also its suffix."""
    borders = [0, 0]
    for character in stop[1:]:
        length = borders[-1]
        while length and stop[length] != character:
            length = borders[length]
        borders.append(length + (stop[length] == character))
    return borders
