"""An answer on the terminal as it is generated, with accepted tokens in colour."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from paceline.cli.style import Style
from paceline.types import Origin, TokenEvent

if TYPE_CHECKING:
    from paceline.llm import Sample
    from paceline.text.tokenizer import Tokenizer


class OriginRuns:
    """Splits the text of events into runs of one origin.

    An event has one text for several tokens, and may hold back text that could be a stop string. So each token queues
    its origin once per character, and each character of text takes one from the queue.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        from paceline.text.detokenizer import IncrementalDecoder

        self._decoder = IncrementalDecoder(tokenizer, continuation=True)
        self._origins: deque[Origin] = deque()  # one per character that is still to come

    def of(self, event: TokenEvent) -> Iterator[tuple[str, Origin]]:
        for token, origin in zip(event.tokens, event.origins, strict=True):
            self._origins.extend([origin] * len(self._decoder.push(token)))
        marked = [(self._next(), character) for character in event.text]
        for origin, run in groupby(marked, key=lambda pair: pair[0]):
            yield "".join(character for _, character in run), origin

    def _next(self) -> Origin:
        return self._origins.popleft() if self._origins else Origin.PLAIN  # an incomplete last character


def show(tokenizer: Tokenizer, events: Iterable[TokenEvent], style: Style, *, into: Sample) -> None:
    """Write the text of events to stdout as they come, and collect them."""
    runs = OriginRuns(tokenizer)
    for event in events:
        into.add(event)
        for text, origin in runs.of(event):
            sys.stdout.write(style.token(text, origin))
        sys.stdout.flush()
