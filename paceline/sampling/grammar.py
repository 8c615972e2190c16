"""Grammars at work: which tokens may follow, for the target and for drafters alike. llguidance does the parsing.

`Grammars` compiles a request's `types.Grammar` for one vocabulary, and keeps the grammars that were used last.
`GrammarState` is the position of one sequence in its grammar: at its committed tokens, from where it looks along drafts
and comes back. Masks are words of 32 tokens each, the lowest bit first, as a device takes them.

Invariants: Control tokens are in no grammar. An end-of-sequence token is allowed exactly where the text so far
is complete. The tokens allowed after a text depend on that text alone, not on earlier queries. Compiling and every
query are bounded, by llguidance's limits and ours: a grammar beyond them is refused, or its answer ends with an error.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from paceline.errors import MissingExtra
from paceline.sampling.grammar_source import first_lines, source, unusable
from paceline.sampling.words import chains, has_token, only_token, pack
from paceline.types import Finish, Grammar

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

__all__ = ["Grammar", "GrammarState", "Grammars"]

MAX_CACHED_GRAMMARS = 64  # compiled grammars that are kept
MAX_CACHED_SPELLINGS = 10_000  # forced texts whose tokens are kept
MAX_RENEWALS = 4  # times that a sequence may start over because its grammar ran into a limit
MAX_GRAMMAR_SIZE = 12_000  # symbols; compiling them takes less than half a second
MAX_LEXER_STATES = 50_000  # states of 1 to 2 kB each
MAX_INLINE_SECONDS = 0.00025  # time of a mask beyond which a worker computes the next; usual ones take 2 to 100 µs
WORKERS = max(1, (os.cpu_count() or 1) - 1)  # threads that compute masks
DEAD_END = "the grammar cannot be followed any further: it is too complex, or no token spells what it asks for"

Path = tuple[int, ...]
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
        self._tokens = [*known, *[b""] * (vocab_size + 1 - len(known))]
        self._special = sorted({*(token for token in special if token < vocab_size), *self.eos_ids})
        self._encode = encode
        self._cached = cached
        self._compiled: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        ends = [token for token in self.eos_ids if token < vocab_size]
        self._not_ends = pack(range(vocab_size), vocab_size) & ~pack(ends, vocab_size)
        self._ends_are_tokens = bool(ends)
        self._end_words = len({token >> 5 for token in ends})
        self._executor: LLExecutor | None = None
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
        """Compute which tokens may come next, uint32 [vocab / 32]. Other threads run meanwhile."""
        words = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint32)[: len(self._not_ends)]
        return words if self._ends_are_tokens else words & self._not_ends

    def masks_along(self, matcher: LLMatcher, path: Path) -> np.ndarray:
        """Compute the mask where a matcher is, and those behind each token of a path from there, as far as it fits:
        uint32 [1 + tokens, vocab / 32]."""
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(num_threads=1)  # threads gain nothing: waking them takes as long as the masks
        words = np.zeros((1 + len(path), -(-(self.vocab_size + 1) // 32)), dtype=np.uint32)
        job = [(matcher, 0, [*path])]
        self._executor.unsafe_compute_mask_ptr_with_draft_token(job, words.ctypes.data, 4 * words.shape[1], len(words))
        fitting = len(words)
        while fitting and not words[fitting - 1].any():  # the rest was not written
            fitting -= 1
        words = words[:fitting, : len(self._not_ends)]
        return words if self._ends_are_tokens else words & self._not_ends

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


class GrammarState:
    """Position of a sequence in its grammar. A path is a list of tokens that may follow the committed ones.

    committed   0 ........ n-1 │
    path                       │ drafted tokens: the matcher is led along them, and back to where two paths part
    """

    def __init__(self, grammars: Grammars, grammar: Grammar) -> None:
        self.beside = False  # True: the mask behind the last token is computed later, by a worker if that takes long
        self._grammars = grammars
        self._grammar = grammar
        self._matcher, first = grammars.fresh(grammar)
        self._committed: list[int] = []
        self._path: Path = ()  # the matcher's position behind the committed tokens
        self._masks: dict[Path, np.ndarray | None] = {(): first}  # masks computed since the last commit
        self._forced: tuple[int, Path] = (0, ())  # a limit, and the forced tokens within it
        self._seconds = math.inf  # time of the latest mask
        self._renewals = 0
        self._lost = False  # True for good: the matcher could not be led to the committed tokens again
        self._lock = threading.Lock()  # workers compute masks, and a drafter that timed out may still look

    def allowed(self, path: Sequence[int]) -> Tensor | None:
        """Tokens that may follow `path`: bool [vocab]. None: there are none, or `path` itself does not fit."""
        mask = self.mask(path)
        if mask is None:
            return None
        bits = np.unpackbits(mask.view(np.uint8), count=self._grammars.vocab_size, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))

    def mask(self, path: Sequence[int] = ()) -> np.ndarray | None:
        """Tokens that may follow `path`: uint32 [vocab / 32], read-only. None as for `allowed`."""
        with self._lock:
            return self._look(tuple(path))

    @property
    def looked(self) -> bool:
        """True if the mask behind the committed tokens is known."""
        return () in self._masks

    def look(self, paths: Sequence[Path]) -> None:
        """Compute the masks behind paths, a tree with parents before children, as far as they fit. If the matcher runs
        into a limit before the first of them is known, all of them are left to a worker."""
        with self._lock:
            for chain in chains(paths):
                self._look_along(chain)

    def known(self, path: Path) -> np.ndarray | None:
        """Return the mask behind `path` if there is one, and it is known."""
        return self._masks.get(path)

    @property
    def slow(self) -> bool:
        """True if masks are left to a worker: the latest one took long, or none was computed yet."""
        return self.beside and self._seconds > MAX_INLINE_SECONDS

    def goes_on(self, mask: np.ndarray) -> bool:
        """True if something other than the end may follow."""
        return self._grammars.goes_on(mask)

    def fits(self, tokens: Sequence[int]) -> tuple[int, Finish | None]:
        """Count the `tokens` that belong to the text, and say why it ends there. STOP: it is complete; ERROR: the
        grammar cannot be followed; None: it goes on, or only the mask behind the last token says that it does not."""
        with self._lock:
            if self.beside:
                return self._fits_as_drawn(tuple(tokens))
            for count in range(1, len(tokens) + 1):
                path = tuple(tokens[:count])
                mask = self._look(path)
                if mask is None:
                    return (count if self._allowed_last(path) else count - 1), Finish.ERROR
                if not self.goes_on(mask):
                    return count, Finish.STOP
        return len(tokens), None

    def advance(self, tokens: Sequence[int]) -> None:
        """Follow tokens that were committed. A matcher that ran into a limit is led to them by the next look."""
        path = tuple(tokens)
        with self._lock:
            self._lost = not (self._walk(path) or self._matcher.is_error()) or self._lost
            self._committed += path
            self._path, self._forced = (), (0, ())
            self._masks = {key[len(path) :]: mask for key, mask in self._masks.items() if key[: len(path)] == path}

    def forced(self, limit: int) -> Path:
        """List the tokens that must come next, at most `limit`: a draft that costs nothing. The spelling of the last
        one may depend on the text after it, so the target can still choose another."""
        with self._lock:
            if limit > self._forced[0]:
                self._forced = limit, self._find_forced(limit)
            return self._forced[1][:limit]

    def _find_forced(self, limit: int) -> Path:
        path: Path = ()
        while len(path) < limit:
            mask = self._look(path)
            if mask is None or (path and not self.goes_on(mask)):  # without a path it goes on, or it had ended
                break
            only = only_token(mask)  # of forced text llguidance allows one spelling
            if only is None:
                break
            path = (*path, *((self._walk(path) and self._matcher.compute_ff_tokens()) or [only]))
        return path

    def _allowed_last(self, path: Path) -> bool:
        """Return True if the last token of `path` fits, whether or not anything may follow it."""
        before = self._masks.get(path[:-1])
        return before is not None and has_token(before, path[-1])

    def _fits_as_drawn(self, path: Path) -> tuple[int, Finish | None]:
        """Answer `fits` for tokens that were drawn with their masks, so that a text which could only end there goes on
        with an end. The mask behind the last token is not needed. A matcher at a limit says nothing: the next look at
        it finds out."""
        for count, token in enumerate(path):
            if token in self._grammars.eos_ids:
                mask = self._masks.get(path[:count])
                if mask is not None and not self.goes_on(mask):
                    return count, Finish.STOP
        fits = self._walk(path)
        if self._matcher.is_error():
            return len(path), None
        if fits:
            return len(path), Finish.STOP if self._matcher.is_stopped() else None
        return len(self._path), Finish.ERROR

    def _look(self, path: Path) -> np.ndarray | None:
        """Return a mask. An error may come from earlier queries, so only one after a fresh start counts."""
        if path not in self._masks and not self._attempt(path):
            self._renew()
            if not self._attempt(path):
                self._masks[path] = None
        return self._masks[path]

    def _attempt(self, path: Path) -> bool:
        """Compute a mask with the matcher as it is. False: it has run into a limit."""
        began = time.perf_counter()
        mask = None if self._lost or not self._walk(path) else self._grammars.mask(self._matcher)
        self._seconds = time.perf_counter() - began
        if self._matcher.is_error() and not self._lost:
            return False
        self._masks[path] = mask
        return True

    def _walk(self, path: Path) -> bool:
        """Move the matcher to the end of `path`. False: the path does not fit, and it stopped where it last did."""
        if path == self._path:
            return True
        shared = 0
        while shared < min(len(path), len(self._path)) and path[shared] == self._path[shared]:
            shared += 1
        if shared < len(self._path):
            self._matcher.rollback(len(self._path) - shared)
        taken = self._matcher.try_consume_tokens(list(path[shared:]))
        self._path = path[: shared + taken]
        return len(self._path) == len(path)

    def _look_along(self, chain: Path) -> None:
        """Compute the unknown masks behind the beginnings of a path."""
        known = 0
        while known < len(chain) and chain[:known] in self._masks:
            known += 1
        start, rest = chain[:known], chain[known:]
        if not rest or self._lost:
            if start not in self._masks:
                self._attempt(start)
        elif not self._matcher.is_error() and self._walk(start):
            began = time.perf_counter()
            masks = self._grammars.masks_along(self._matcher, rest)
            self._seconds = (time.perf_counter() - began) / (1 + len(rest))
            if not self._matcher.is_error():
                self._masks.update({start + rest[:i]: mask for i, mask in enumerate(masks)})
        if self._matcher.is_error() and () in self._masks:  # the draft is laid out: its masks cannot wait for a worker
            for count in range(known, len(chain) + 1):
                self._look(chain[:count])

    def _renew(self) -> None:
        """Start over with a freshly compiled grammar, which has not run into a limit yet."""
        self._renewals += 1
        self._path = ()
        if self._renewals > MAX_RENEWALS:
            self._lost = True
            return
        self._matcher, _ = self._grammars.fresh(self._grammar, anew=True)
        self._lost = self._matcher.try_consume_tokens(self._committed) < len(self._committed)
