"""Grammars at work: which tokens may follow, for the target and for drafters alike. llguidance does the parsing.

`Grammars` compiles a request's `types.Grammar` for one vocabulary, and keeps the grammars that were used last.
`GrammarState` is the position of one sequence in its grammar: at its committed tokens, from where it looks along drafts
and comes back. Masks are words of 32 tokens each, the lowest bit first, as a device takes them.

Invariants: Control tokens are in no grammar. An end-of-sequence token is allowed exactly where the text so far
is complete. The tokens allowed after a text depend on that text alone, not on earlier queries. Compiling and every
query are bounded, by llguidance's limits and ours: a grammar beyond them is refused, or its answer ends with an error.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from paceline.errors import MissingExtra
from paceline.sampling.grammar_source import first_lines, source, unusable
from paceline.sampling.grammar_state import GrammarState
from paceline.sampling.words import MaskSheet, Path, pack, padded_size
from paceline.types import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["Grammar", "GrammarState", "Grammars"]

MAX_CACHED_GRAMMARS = 64  # compiled grammars that are kept
MAX_CACHED_SPELLINGS = 10_000  # forced texts whose tokens are kept
MAX_GRAMMAR_SIZE = 12_000  # symbols; compiling them takes less than half a second
MAX_LEXER_STATES = 50_000  # states of 1 to 2 kB each

Compiled = tuple["LLMatcher", np.ndarray]
"""A matcher at the beginning of the text, and its mask there."""


class Grammars:
    """Compiles grammars for one vocabulary. Any thread may compile; a `GrammarState` belongs to its sequence."""

    def __init__(
        self,
        tokens: Sequence[bytes],
        *,
        special: Iterable[int],
        eos_ids: Iterable[int],
        vocab_size: int,
        encode: Callable[[str], Sequence[int]],
        cached: int = MAX_CACHED_GRAMMARS,
    ) -> None:
        """`tokens` are the bytes of each token; the model knows the first `vocab_size`. `encode` maps text in the
        middle of an answer to ids, to guess how forced text will be spelt."""
        known = list(tokens[:vocab_size])
        self.eos_ids = frozenset(eos_ids) or frozenset({vocab_size})  # llguidance wants one; this one is never drawn
        self.vocab_size = vocab_size
        self._tokens = [*known, *[b""] * (padded_size(vocab_size) - len(known))]
        self._special = sorted({*(token for token in special if token < vocab_size), *self.eos_ids})
        self._encode = encode
        self._cached = cached
        self._compiled: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        ends = [token for token in self.eos_ids if token < vocab_size]
        self._not_ends = pack(range(vocab_size), vocab_size) & ~pack(ends, vocab_size)
        self._ends_are_tokens = bool(ends)
        self._an_end = min(self.eos_ids)
        self._end_words = len({token >> 5 for token in self.eos_ids})
        self._spelt: dict[bytes, list[int]] = {}

    def __len__(self) -> int:
        return len(self._compiled)

    def compile(self, grammar: Grammar) -> None:
        """Compile a grammar for `start`. Raises InvalidRequest if it cannot be used. May take half a second."""
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return
        compiled = self._compile(grammar)
        with self._lock:
            self._compiled[grammar] = compiled
            while len(self._compiled) > self._cached:
                self._compiled.popitem(last=False)

    def start(self, grammar: Grammar) -> GrammarState:
        return GrammarState(self, grammar)

    def fresh(self, grammar: Grammar, *, anew: bool = False) -> Compiled:
        """Make a matcher at the beginning of the text. Copies of a compiled grammar share their state, including that
        it ran into a limit: `anew` compiles the grammar once more."""
        if anew:
            with self._lock:
                self._compiled.pop(grammar, None)
        while True:
            self.compile(grammar)
            with self._lock:
                if grammar in self._compiled:  # other threads may have pushed it out again
                    matcher, first = self._compiled[grammar]
                    return matcher.deep_copy(), first

    def mask(self, matcher: LLMatcher) -> np.ndarray:
        """Compute which tokens may come next, uint32 [words]. Other threads run meanwhile."""
        words = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint32)
        return words if self._ends_are_tokens else words & self._not_ends

    def masks_along(self, matcher: LLMatcher, path: Path, sheet: MaskSheet, first: int) -> None:
        """Write the mask where a matcher is, and those behind each token of a path from there, as far as it fits, to
        adjacent masks of a sheet. Other threads run meanwhile."""
        # A method of its own with threads for many matchers exists; waking them takes longer than usual masks.
        matcher.unsafe_compute_mask_ptr_with_draft_token(  # type: ignore[attr-defined]  # not declared by llguidance
            sheet.address + first * sheet.mask_bytes, sheet.mask_bytes, [*path]
        )

    def only_ends(self, mask: np.ndarray) -> bool:
        """True if nothing but an end may follow. At once where the text is not complete: llguidance allows no end."""
        end = self._an_end
        return mask.item(end >> 5) >> (end & 31) & 1 != 0 and not self.goes_on(mask)

    def goes_on(self, mask: np.ndarray) -> bool:
        """True if something other than the end may follow."""
        return bool(np.count_nonzero(mask) > self._end_words or (mask & self._not_ends).any())

    def _compile(self, grammar: Grammar) -> Compiled:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError:
            raise MissingExtra("grammars need llguidance", extra="grammar") from None
        limits = LLParserLimits(
            max_grammar_size=MAX_GRAMMAR_SIZE, max_lexer_states=MAX_LEXER_STATES, verbose_errors=False
        )
        try:
            matcher = LLMatcher(self._tokenizer(), source(grammar), limits=limits, log_level=0)
        except (ValueError, RuntimeError, RecursionError) as error:
            raise unusable(grammar, first_lines(error)) from None
        if matcher.is_error():
            raise unusable(grammar, first_lines(matcher.get_error()))
        first = self.mask(matcher)
        if matcher.is_error() or not self.goes_on(first):
            raise unusable(grammar, "no text that this model spells fits it")
        return matcher, first

    def _tokenizer(self) -> LLTokenizer:
        """Return llguidance's view of the vocabulary. The first grammar makes it, which takes a tenth of a second."""
        with self._lock:
            if self._vocabulary is None:
                from llguidance import LLTokenizer, TokenizerWrapper

                self._vocabulary = LLTokenizer(TokenizerWrapper(_Spelling(self)), eos_token=sorted(self.eos_ids))
            return self._vocabulary

    def spell(self, text: bytes) -> list[int]:
        """Find token ids that spell exactly these bytes: by the vocabulary's own encoder, or else by the longest tokens
        that fit. llguidance allows no other spelling of forced text, and asks for the same ones again and again."""
        if len(self._spelt) >= MAX_CACHED_SPELLINGS:
            self._spelt.clear()
        if text not in self._spelt:
            self._spelt[text] = self._spell(text)
        return self._spelt[text]

    def _spell(self, text: bytes) -> list[int]:
        ids = list(self._encode(text.decode(errors="replace")))
        if max(ids, default=0) < self.vocab_size and b"".join(self._tokens[i] for i in ids) == text:
            return ids
        ids, start = [], 0
        while start < len(text):
            ends = range(min(len(text), start + self._longest), start, -1)
            end = next((end for end in ends if text[start:end] in self._ids), None)
            if end is None:  # no token spells this byte, so the grammar cannot be followed
                return []
            ids.append(self._ids[text[start:end]])
            start = end
        return ids

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        special = {*self._special}
        return {token: i for i, token in enumerate(self._tokens) if token and i not in special}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids), default=0)


class _Spelling:
    """A vocabulary with the attributes that llguidance reads."""

    bos_token_id = None

    def __init__(self, grammars: Grammars) -> None:
        self.eos_token_id = min(grammars.eos_ids)
        self.tokens = grammars._tokens
        self.special_token_ids = grammars._special
        self._spell = grammars.spell

    def __call__(self, text: bytes) -> list[int]:
        return self._spell(text)
