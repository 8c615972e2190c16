"""Keep control tokens out of messages.

Before a chat template is rendered, the characters in messages that begin or end control tokens ("<", ">") are swapped
for private marks, one for one, so that lengths and positions stay. Afterwards every control token in the rendered text
is the template's own; then the marks are swapped back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from paceline.chat.messages import ROLES
from paceline.errors import InvalidRequest
from paceline.text.tokenizer import Tokenizer

PART_CHARACTERS = 1 << 16  # of a text that is translated at once: 2 ms


class Shield:
    """Swaps characters of users' strings so that no control token can be read out of them, even if a template joins
    two, trims one, or cuts a piece out of the middle.

    Words that the template itself names ("</think>") stay as they are, since the template may look for them, unless
    they could be part of a control token.
    """

    def __init__(self, tokenizer: Tokenizer, source: str, literals: Iterable[str]) -> None:
        texts = tokenizer.control_texts
        edges = {character for text in texts for character in (text[0], text[-1]) if _markable(character)}
        wordlike = {text[0] for text in texts if edges.isdisjoint(text)}  # control tokens of letters: swap the first
        self._find = tokenizer.find_control
        self._source = source
        self._marked = sorted(edges | wordlike)
        self._edges = edges
        self._everywhere = not wordlike
        named = [
            literal
            for literal in literals
            if not edges.isdisjoint(literal) and not any(literal in text or text in literal for text in texts)
        ]
        named.sort(key=len, reverse=True)
        self._named = re.compile(f"({'|'.join(map(re.escape, named))})") if named else None

    def hide(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], dict[int, str]]:
        """Put marks into the inputs. Returns them with a table for `str.translate` that swaps the marks back."""
        if self._everywhere and not any(map(self._has_edge, strings(inputs))):
            return inputs, {}
        texts = [self._source, *strings(inputs)]
        free = (mark for mark in map(chr, range(0x10FFFD, 0x10FF00, -1)) if not any(mark in text for text in texts))
        marks = dict(zip(self._marked, free, strict=False))
        if len(marks) < len(self._marked):
            raise InvalidRequest("the messages use up the private characters U+10FF00 to U+10FFFD; leave some out")
        hidden = {name: _map_strings(value, lambda text: self._mark(text, marks)) for name, value in inputs.items()}
        return hidden, {ord(mark): character for character, mark in marks.items()}

    def _mark(self, text: str, marks: Mapping[str, str]) -> str:
        if text in ROLES:
            return text
        swap = {ord(character): marks[character] for character in self._edges}
        parts = self._named.split(text) if self._named else [text]  # odd parts are words that the template names
        text = "".join(part if at % 2 else swapped(part, swap) for at, part in enumerate(parts))
        if self._everywhere and not self._has_edge(text):
            return text
        everything = {ord(character): mark for character, mark in marks.items()}
        while found := self._find(text):  # all at once: one by one takes quadratic time
            starts, ends = [start for start, _, _ in found], [end for _, end, _ in found]
            inside = [text[start:end].translate(everything) for start, end in zip(starts, ends, strict=True)]
            between = [text[end:start] for end, start in zip([0, *ends], [*starts, len(text)], strict=True)]
            text = "".join(part for pair in zip(between, [*inside, ""], strict=True) for part in pair)
        return text

    def _has_edge(self, text: str) -> bool:
        return any(edge in text for edge in self._edges)  # much faster than by sets of characters


def _markable(character: str) -> bool:
    """True for a character that a mark can replace: no letter, digit or space, and none that JSON escapes."""
    return character.isprintable() and not character.isalnum() and character not in ' "\\'


def swapped(text: str, table: Mapping[int, str]) -> str:
    """Translate a text part by part, since other threads wait for the whole of one call."""
    if not table:
        return text
    return "".join(text[at : at + PART_CHARACTERS].translate(table) for at in range(0, len(text), PART_CHARACTERS))


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _map_strings(item, change) for key, item in value.items()}
    return [_map_strings(item, change) for item in value] if isinstance(value, list) else value
