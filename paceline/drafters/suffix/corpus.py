"""The corpus: text files that drafters read at the start, such as the code that an agent works on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from paceline.errors import InvalidRequest
from paceline.kernels.cpu.build import Library
from paceline.kernels.cpu.suffix import SuffixAutomaton
from paceline.sizes import format_size
from paceline.text.tokenizer import Tokenizer

CHUNK_TOKENS = 1 << 14  # tokens after which the automaton's memory is checked


def read_corpus(paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Read files of UTF-8 text: pairs of a path and its text. Raises InvalidRequest for one that cannot be used."""
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise InvalidRequest(
                f"the corpus file {path!r} cannot be read: {error.strerror}; give a text file"
            ) from None
        except UnicodeDecodeError as error:
            at = f"byte {error.start} is not UTF-8"
            raise InvalidRequest(f"the corpus file {path!r} is no text: {at}; give files of UTF-8 text") from None
        if not text.strip():
            raise InvalidRequest(f"the corpus file {path!r} holds no text; leave it out")
        yield path, text


def index_corpus(paths: Sequence[str], tokenizer: Tokenizer, library: Library, *, memory: int) -> SuffixAutomaton:
    """Index files in an automaton of at most `memory` bytes. Raises InvalidRequest if they take more."""
    automaton = SuffixAutomaton(library)
    for path, text in read_corpus(paths):
        tokens = np.array(tokenizer.encode(text, add_bos=False), dtype=np.int32)
        for start in range(0, len(tokens), CHUNK_TOKENS):
            automaton.extend(tokens[start : start + CHUNK_TOKENS])
            if automaton.bytes > memory:
                raise InvalidRequest(
                    f"the corpus takes more than {format_size(memory)}, from token {start} of {path!r} on: give less "
                    "text, or more memory by suffix:memory=SIZE"
                )
        automaton.end_text()
    return automaton
