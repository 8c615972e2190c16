"""Grammars at work: which tokens may follow, for the target and for drafters alike. llguidance does the parsing.

`Grammars` compiles what a request describes (`types.Grammar`) for one vocabulary and keeps what was compiled lately.
`GrammarState` is where one sequence stands: at its committed tokens, from where it looks along drafts and comes back.

What always holds: control tokens are in no grammar; an end-of-sequence token is allowed exactly where the text so far
is complete; what is allowed after some tokens depends on them alone, not on what was looked at before. Compiling and
every look are bounded, by llguidance's limits and ours: a grammar beyond them is refused, or its answer ends with an
error.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from paceline.errors import InvalidRequest, MissingExtra
from paceline.sampling.schema_limits import MAX_TEXT, checked_schema
from paceline.types import Finish, Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["Grammar", "GrammarState", "Grammars"]

CACHED = 64  # compiled grammars that are kept
RENEWALS = 4  # of a sequence: how often it may start over because its grammar ran into a limit
MAX_GRAMMAR_SIZE = 12_000  # symbols: less than half a second of compiling
MAX_LEXER_STATES = 50_000  # 1 to 2 kB each
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,24}"  # between the parts of JSON: a small model would go on for ever
DEAD_END = "the grammar cannot be followed any further: it is too complex, or no token spells what it asks for"

Path = tuple[int, ...]


class Grammars:
    """Compiles grammars for one vocabulary. Any thread may compile; a GrammarState belongs to its sequence."""

    def __init__(
        self,
        tokens: Sequence[bytes],
        *,
        special: Iterable[int],
        eos_ids: Iterable[int],
        vocab_size: int,
        encode: Callable[[str], Sequence[int]],
        cached: int = CACHED,
    ) -> None:
        """`tokens`: the bytes of each, of which the model knows `vocab_size`. `encode`: text in the middle of an answer
        to ids, to guess how forced text will be spelt."""
        known = list(tokens[:vocab_size])
        self.eos_ids = frozenset(eos_ids) or frozenset({vocab_size})  # the latter is never drawn
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
        """Have it ready for `start`; raises InvalidRequest if it cannot be used. May take half a second."""
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
        """At the beginning of the text. Copies share what they learn of the grammar, also that it ran into a limit:
        with `anew` it is compiled once more."""
        if anew:
            with self._lock:
                self._compiled.pop(grammar, None)
        while True:
            self.compile(grammar)
            with self._lock:
                if grammar in self._compiled:  # others may compile so much at once that it is gone again
                    return self._compiled[grammar].deep_copy()

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError:
            raise MissingExtra("grammars need llguidance: pip install 'paceline[serve]'") from None
        limits = LLParserLimits(
            max_grammar_size=MAX_GRAMMAR_SIZE, max_lexer_states=MAX_LEXER_STATES, verbose_errors=False
        )
        try:
            matcher = LLMatcher(self._tokenizer(), _source(grammar), limits=limits, log_level=0)
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
        """Building it takes a tenth of a second, so it waits for the first grammar."""
        with self._lock:
            if self._vocabulary is None:
                from llguidance import LLTokenizer, TokenizerWrapper

                self._vocabulary = LLTokenizer(TokenizerWrapper(_Spelling(self)), eos_token=sorted(self.eos_ids))
            return self._vocabulary

    def spell(self, text: bytes) -> list[int]:
        """Token ids of exactly these bytes: by the vocabulary's own encoder, or else by the longest tokens that fit.
        Where text is forced, no other spelling of it is allowed."""
        ids = list(self._encode(text.decode(errors="replace")))
        if max(ids, default=0) < self.vocab_size and b"".join(self._tokens[i] for i in ids) == text:
            return ids
        ids, start = [], 0
        while start < len(text):
            ends = range(min(len(text), start + self._longest), start, -1)
            end = next((end for end in ends if text[start:end] in self._ids), None)
            if end is None:  # no token has this byte: the grammar leads nowhere
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
    """A vocabulary as llguidance wants it."""

    bos_token_id = None

    def __init__(self, grammars: Grammars) -> None:
        self.eos_token_id = min(grammars.eos_ids)
        self.tokens = grammars._tokens
        self.special_token_ids = grammars._special
        self._spell = grammars.spell

    def __call__(self, text: bytes) -> list[int]:
        return self._spell(text)


class GrammarState:
    """Where a sequence stands in its grammar. A path is a list of tokens that may follow the committed ones.

    committed   0 ........ n-1 │
    path                       │ drafted tokens: the matcher is led along them, and back to where two paths part
    """

    def __init__(self, grammars: Grammars, grammar: Grammar) -> None:
        self._grammars = grammars
        self._grammar = grammar
        self._matcher = grammars.fresh(grammar)
        self._committed: list[int] = []
        self._path: Path = ()  # where the matcher is
        self._masks: dict[Path, np.ndarray | None] = {}  # what was found since the last commit
        self._renewals = 0
        self._lost = False  # for good: the matcher could not be led to the committed tokens again
        self._lock = threading.Lock()  # a drafter that hangs may still be looking, on a thread of its own

    def allowed(self, path: Sequence[int]) -> Tensor | None:
        """Which tokens may follow `path`: bool [vocab]. None: nothing can, or `path` itself does not fit."""
        with self._lock:
            mask = self._look(tuple(path))
        return None if mask is None else torch.from_numpy(mask)

    def fits(self, tokens: Sequence[int]) -> tuple[int, Finish | None]:
        """How many of `tokens` belong to the text, and why it ends there, if it does: it is complete, or the grammar
        cannot be followed."""
        with self._lock:
            for count in range(1, len(tokens) + 1):
                mask = self._look(tuple(tokens[:count]))
                if mask is None:
                    return count - 1, Finish.ERROR
                if not self._goes_on(mask):
                    return count, Finish.STOP
        return len(tokens), None

    def advance(self, tokens: Sequence[int]) -> None:
        """These tokens were committed."""
        path = tuple(tokens)
        with self._lock:
            if self._matcher.is_error():
                self._renew()
            self._lost = not self._walk(path) or self._lost
            self._committed += path
            self._path = ()
            self._masks = {key[len(path) :]: mask for key, mask in self._masks.items() if key[: len(path)] == path}

    def forced(self, limit: int) -> Path:
        """The tokens that must come next, at most `limit`: a free draft. How the last one is spelt may depend on what
        follows, so that the target can still choose another."""
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
        """An error may come of all that was looked at before: only one from a fresh start counts."""
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
        """Lead the matcher to `path`, as far as it fits."""
        shared = 0
        while shared < min(len(path), len(self._path)) and path[shared] == self._path[shared]:
            shared += 1
        if shared < len(self._path):
            self._matcher.rollback(len(self._path) - shared)
        taken = self._matcher.try_consume_tokens(list(path[shared:]))
        self._path = path[: shared + taken]
        return len(self._path) == len(path)

    def _renew(self) -> None:
        """Begin anew, with a grammar that has not run into a limit yet."""
        self._renewals += 1
        self._path = ()
        if self._renewals > RENEWALS:
            self._lost = True
            return
        self._matcher = self._grammars.fresh(self._grammar, anew=True)
        self._lost = self._matcher.try_consume_tokens(self._committed) < len(self._committed)


def _mask_of(matcher: LLMatcher, vocab_size: int) -> np.ndarray:
    """What may come next, bool [vocab]."""
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    return np.unpackbits(bits, count=vocab_size, bitorder="little").view(np.bool_)


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's own language."""
    from llguidance import LLMatcher

    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "choice":
        return LLMatcher.grammar_from_regex("|".join(map(re.escape, _choices(grammar.text))))
    schema = checked_schema(grammar.text) if grammar.kind == "json_schema" else {"type": "object"}
    text, own = json.dumps(schema), "x-guidance" in schema  # the schema's own options
    return LLMatcher.grammar_from_json_schema(text, defaults=None if own else {"whitespace_pattern": WHITESPACE})


def _choices(text: str) -> list[str]:
    choices = json.loads(text)
    if not isinstance(choices, list) or not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError("choices are a JSON list of non-empty texts")
    if any(len(choice) > MAX_TEXT for choice in choices):
        raise ValueError(f"a choice is too big: at most {MAX_TEXT} characters are allowed")
    return choices


def _unusable(grammar: Grammar, reason: str) -> InvalidRequest:
    return InvalidRequest(f"this {grammar.kind} grammar cannot be used: {reason}", param="grammar")


def _first_lines(error: object) -> str:
    """llguidance draws where the error is over several lines."""
    return " ".join(str(error).removesuffix("<non-verbose/>").split())[:400]
