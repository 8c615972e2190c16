"""Grammars at work: which tokens may follow, for the target and for drafters alike. llguidance does the parsing.

`Grammars` compiles a request's `types.Grammar` for one vocabulary, and keeps the grammars that were used last.
`GrammarState` is the position of one sequence in its grammar: at its committed tokens, from where it looks along drafts
and comes back.

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
import torch
from torch import Tensor

from paceline.errors import InvalidRequest, MissingExtra
from paceline.sampling.grammar_source import source
from paceline.types import Finish, Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["Grammar", "GrammarState", "Grammars"]

MAX_CACHED_GRAMMARS = 64  # compiled grammars that are kept
MAX_RENEWALS = 4  # times that a sequence may start over because its grammar ran into a limit
MAX_GRAMMAR_SIZE = 12_000  # symbols; compiling them takes less than half a second
MAX_LEXER_STATES = 50_000  # states of 1 to 2 kB each
DEAD_END = "the grammar cannot be followed any further: it is too complex, or no token spells what it asks for"

Path = tuple[int, ...]


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
        self._tokens = [*known, *[b""] * (vocab_size + 1 - len(known))]
        self._special = sorted({*(token for token in special if token < vocab_size), *self.eos_ids})
        self._encode = encode
        self._cached = cached
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None

    def __len__(self) -> int:
        return len(self._compiled)

    def compile(self, grammar: Grammar) -> None:
        """Compile a grammar for `start`. Raises InvalidRequest if it cannot be used. May take half a second."""
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return
        matcher = self._matcher(grammar)
        with self._lock:
            self._compiled[grammar] = matcher
            while len(self._compiled) > self._cached:
                self._compiled.popitem(last=False)

    def start(self, grammar: Grammar) -> GrammarState:
        return GrammarState(self, grammar)

    def fresh(self, grammar: Grammar, *, anew: bool = False) -> LLMatcher:
        """Make a matcher at the beginning of the text. Copies of a compiled grammar share their state, including that
        it ran into a limit: `anew` compiles the grammar once more."""
        if anew:
            with self._lock:
                self._compiled.pop(grammar, None)
        while True:
            self.compile(grammar)
            with self._lock:
                if grammar in self._compiled:  # other threads may have pushed it out again
                    return self._compiled[grammar].deep_copy()

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError:
            raise MissingExtra("grammars need llguidance", extra="serve") from None
        limits = LLParserLimits(
            max_grammar_size=MAX_GRAMMAR_SIZE, max_lexer_states=MAX_LEXER_STATES, verbose_errors=False
        )
        try:
            matcher = LLMatcher(self._tokenizer(), source(grammar), limits=limits, log_level=0)
        except (ValueError, RuntimeError, RecursionError) as error:
            raise _unusable(grammar, _first_lines(error)) from None
        if matcher.is_error():
            raise _unusable(grammar, _first_lines(matcher.get_error()))
        mask = _mask_of(matcher, self.vocab_size)
        mask[[token for token in self.eos_ids if token < self.vocab_size]] = False
        if matcher.is_error() or not mask.any():
            raise _unusable(grammar, "no text that this model spells fits it")
        return matcher

    def _tokenizer(self) -> LLTokenizer:
        """Return llguidance's view of the vocabulary. The first grammar makes it, which takes a tenth of a second."""
        with self._lock:
            if self._vocabulary is None:
                from llguidance import LLTokenizer, TokenizerWrapper

                self._vocabulary = LLTokenizer(TokenizerWrapper(_Spelling(self)), eos_token=sorted(self.eos_ids))
            return self._vocabulary

    def spell(self, text: bytes) -> list[int]:
        """Find token ids that spell exactly these bytes: by the vocabulary's own encoder, or else by the longest tokens
        that fit. llguidance allows no other spelling of forced text."""
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


class GrammarState:
    """Position of a sequence in its grammar. A path is a list of tokens that may follow the committed ones.

    committed   0 ........ n-1 │
    path                       │ drafted tokens: the matcher is led along them, and back to where two paths part
    """

    def __init__(self, grammars: Grammars, grammar: Grammar) -> None:
        self._grammars = grammars
        self._grammar = grammar
        self._matcher = grammars.fresh(grammar)
        self._committed: list[int] = []
        self._path: Path = ()  # the matcher's position behind the committed tokens
        self._masks: dict[Path, np.ndarray | None] = {}  # masks computed since the last commit
        self._renewals = 0
        self._lost = False  # True for good: the matcher could not be led to the committed tokens again
        self._lock = threading.Lock()  # a drafter that timed out may still look, on a thread of its own

    def allowed(self, path: Sequence[int]) -> Tensor | None:
        """Tokens that may follow `path`: bool [vocab]. None: there are none, or `path` itself does not fit."""
        with self._lock:
            mask = self._look(tuple(path))
        return None if mask is None else torch.from_numpy(mask)

    def fits(self, tokens: Sequence[int]) -> tuple[int, Finish | None]:
        """Count the `tokens` that belong to the text, and say why it ends there. STOP: it is complete; ERROR: the
        grammar cannot be followed; None: it goes on."""
        with self._lock:
            for count in range(1, len(tokens) + 1):
                mask = self._look(tuple(tokens[:count]))
                if mask is None:
                    return count - 1, Finish.ERROR
                if not self._goes_on(mask):
                    return count, Finish.STOP
        return len(tokens), None

    def advance(self, tokens: Sequence[int]) -> None:
        """Follow tokens that were committed."""
        path = tuple(tokens)
        with self._lock:
            if self._matcher.is_error():
                self._renew()
            self._lost = not self._walk(path) or self._lost
            self._committed += path
            self._path = ()
            self._masks = {key[len(path) :]: mask for key, mask in self._masks.items() if key[: len(path)] == path}

    def forced(self, limit: int) -> Path:
        """List the tokens that must come next, at most `limit`: a draft that costs nothing. The spelling of the last
        one may depend on the text after it, so the target can still choose another."""
        path: Path = ()
        with self._lock:
            while len(path) < limit:
                mask = self._look(path)
                if mask is None or not self._goes_on(mask):
                    break
                only = np.flatnonzero(mask).tolist() if np.count_nonzero(mask) == 1 else []
                more = only or (self._matcher.compute_ff_tokens() if self._walk(path) else [])
                if not more:
                    break
                path = (*path, *more)
        return path[:limit]

    def _goes_on(self, mask: np.ndarray) -> bool:
        """True if something other than the end may follow."""
        ends = sum(bool(mask[token]) for token in self._grammars.eos_ids if token < len(mask))
        return int(np.count_nonzero(mask)) > ends

    def _look(self, path: Path) -> np.ndarray | None:
        if path not in self._masks:
            self._masks[path] = self._mask(path)
        return self._masks[path]

    def _mask(self, path: Path) -> np.ndarray | None:
        """Compute a mask. An error may come from earlier queries, so only one after a fresh start counts."""
        for _ in range(2):
            if self._matcher.is_error():
                self._renew()
            if self._lost:
                return None
            mask = _mask_of(self._matcher, self._grammars.vocab_size) if self._walk(path) else None
            if not self._matcher.is_error():
                return mask
        return None

    def _walk(self, path: Path) -> bool:
        """Move the matcher to the end of `path`. False: the path does not fit, and it stopped where it last did."""
        shared = 0
        while shared < min(len(path), len(self._path)) and path[shared] == self._path[shared]:
            shared += 1
        if shared < len(self._path):
            self._matcher.rollback(len(self._path) - shared)
        taken = self._matcher.try_consume_tokens(list(path[shared:]))
        self._path = path[: shared + taken]
        return len(self._path) == len(path)

    def _renew(self) -> None:
        """Start over with a freshly compiled grammar, which has not run into a limit yet."""
        self._renewals += 1
        self._path = ()
        if self._renewals > MAX_RENEWALS:
            self._lost = True
            return
        self._matcher = self._grammars.fresh(self._grammar, anew=True)
        self._lost = self._matcher.try_consume_tokens(self._committed) < len(self._committed)


def _mask_of(matcher: LLMatcher, vocab_size: int) -> np.ndarray:
    """Tokens that may come next, bool [vocab]."""
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    return np.unpackbits(bits, count=vocab_size, bitorder="little").view(np.bool_)


def _unusable(grammar: Grammar, reason: str) -> InvalidRequest:
    return InvalidRequest(f"this {grammar.kind} grammar cannot be used: {reason}", param="grammar")


def _first_lines(error: object) -> str:
    """Write an error of llguidance, which takes several lines, on one line of at most 400 characters."""
    return " ".join(str(error).removesuffix("<non-verbose/>").split())[:400]
