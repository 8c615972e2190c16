"""The position of a sequence in its grammar: at its committed tokens, from where it looks along drafts and comes back.

Masks are computed one by one for the host's steps, and by whole drafts into a sheet for a device's. A mask that may
take long is left to a worker.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Collection, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from paceline.sampling.words import Branch, MaskSheet, Path, has_token
from paceline.types import Finish, Grammar

if TYPE_CHECKING:
    from paceline.sampling.grammar import Grammars

MAX_RENEWALS = 4  # times that a sequence may start over because its grammar ran into a limit
REPLAYED_MASKS = 64  # last committed tokens before which masks are computed when a sequence starts over
MAX_INLINE_SECONDS = 0.00025  # CPU time of a mask beyond which a worker computes the next; usual ones take 2 to 100 µs
WORKERS = max(1, (os.cpu_count() or 1) - 1)  # threads that compute masks
DEAD_END = "the grammar cannot be followed any further: it is too complex, or no token spells what it asks for"


class Outlook(Enum):
    """Continuations of a text that a grammar allows."""

    TOKENS = auto()
    END = auto()  # the text is complete, and only its end may follow
    NOTHING = auto()  # the grammar cannot be followed any further
    UNKNOWN = auto()  # a worker must compute the mask


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
        self._fitting: dict[Path, bool] = {}  # paths looked at since the last commit: whether the last token is allowed
        self._seconds = math.inf  # CPU time of the latest mask; others may run between its beginning and its end
        self._renewals = 0
        self._lost = False  # True for good: the matcher could not be led to the committed tokens again
        self._lock = threading.Lock()  # workers compute masks, and a drafter that timed out may still look
        # Tokens that must come next: a draft that costs nothing. The spelling of the last one may depend on the text
        # after it, so the target can still choose another.
        self.forced: Path = self._forced_here()
        self._told: tuple[Path, Sequence[int]] = (), self.forced  # a path, and the tokens that are forced behind it

    def allowed(self, path: Sequence[int]) -> Tensor | None:
        """Tokens that may follow `path`: bool [vocab]. None: there are none, or `path` itself does not fit."""
        mask = self.mask(path)
        if mask is None:
            return None
        bits = np.unpackbits(mask.view(np.uint8), count=self._grammars.vocab_size, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))

    def mask(self, path: Sequence[int] = ()) -> np.ndarray | None:
        """Tokens that may follow `path`: uint32 [words], read-only. None as for `allowed`."""
        with self._lock:
            return self._look(tuple(path))

    @property
    def looked(self) -> bool:
        """True if the mask behind the committed tokens is known."""
        return () in self._masks

    def outlook(self) -> Outlook:
        """Say what may follow the committed tokens, by the mask behind them if it is known."""
        if () not in self._masks:
            return Outlook.UNKNOWN
        mask = self._masks[()]
        if mask is None:
            return Outlook.NOTHING
        return Outlook.TOKENS if self.goes_on(mask) else Outlook.END

    def fill(self, branches: Sequence[Branch], sheet: MaskSheet) -> Outlook:
        """Write the masks of the rows of a draft to a sheet, and say what may follow the committed tokens. Rows behind
        a token that does not fit get none. If the outlook is unknown, the masks are not valid."""
        with self._lock:
            if () in self._masks:
                self._fill_one_by_one(branches, sheet)
                return self.outlook()
            if self._lost:
                return Outlook.UNKNOWN
            first = sheet.used
            self._fill_along(branches, sheet)
            self._seconds = sheet.lap() / (sheet.used - first)
            if self._matcher.is_error():
                return Outlook.UNKNOWN
            mask = sheet.words[first]
            return Outlook.END if self._grammars.only_ends(mask) else Outlook.TOKENS

    @property
    def strained(self) -> bool:
        """True if the grammar ran into a limit before. Each look ahead may then cost a fresh start, of which there are
        few."""
        return self._renewals > 0

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
        if self.beside:
            return self._fits_as_drawn(tuple(tokens))
        with self._lock:
            for count in range(1, len(tokens) + 1):
                path = tuple(tokens[:count])
                if self._surely_goes_on(path):
                    continue
                mask = self._look(path)
                if mask is None:
                    return (count if self._allowed_last(path) else count - 1), Finish.ERROR
                if not self.goes_on(mask):
                    return count, Finish.STOP
        return len(tokens), None

    def _surely_goes_on(self, path: Path) -> bool:
        """Return True if more than an end may follow a path: its text is not complete, or its last token may come once
        more. No mask is computed. False says nothing."""
        matcher = self._matcher
        if not self._fitting.get(path, False) or not self._walk(path) or matcher.is_stopped():
            return False
        return not matcher.is_accepting() or matcher.validate_tokens([path[-1]]) == 1

    def fitting(self, tokens: Sequence[int]) -> int:
        """Count the first of some tokens that masks would allow, without computing any.

        Where the grammar forces a text, masks allow one spelling of it, although the matcher follows others, too. Of a
        slow grammar, tokens that only a mask can tell do not count: an end, and all after a limit."""
        path = tuple(tokens)
        if self.slow:
            path = () if self.strained else path[: self._first_end(path)]
        with self._lock:
            count = 0
            while count < len(path) and (fits := self._fitting.get(path[: count + 1])) is not None:
                if not fits:
                    return count
                count += 1
            return self._fitting_from(path, count) if count < len(path) else count

    def _fitting_from(self, path: Path, start: int) -> int:
        """Count the first tokens of a path that masks would allow, as they do the first `start`."""
        end = self._follow(path, start)
        while end < len(path) and self._is_allowed(path[:end], path[end]):
            end += 1
        for count in range(start + 1, end + 1):
            self._fitting[path[:count]] = True
        if end < len(path):
            self._fitting[path[: end + 1]] = False
        return end

    def _follow(self, path: Path, start: int) -> int:
        """Lead the matcher along a path, from behind its first `start` tokens, as far as it alone says that masks would
        allow the next one. Returns the number of tokens behind which it is, at least `start`."""
        if self._masks or self._renewals or not (path[:start] == self._path or self._walk(path[:start])):
            return start
        matcher, ends, end = self._matcher, self._grammars.eos_ids, start
        told, forced = self._told
        if told != self._path:
            forced = matcher.compute_ff_tokens()
        for token in path[start:]:
            if token in ends or (forced and forced[0] != token) or not matcher.try_consume_tokens([token]):
                break
            end += 1
            forced = matcher.compute_ff_tokens()
        self._path = path[:end]
        self._told = self._path, forced
        return end

    def _is_allowed(self, before: Path, token: int) -> bool:
        """Return True if a token may follow a path that fits."""
        by_matcher = before not in self._masks and token not in self._grammars.eos_ids and not self._renewals
        if by_matcher and self._walk(before):
            forced = self._matcher.compute_ff_tokens()
            if not self._matcher.is_error():
                return forced[0] == token if forced else self._walk((*before, token))
        mask = self._look(before)
        return mask is not None and has_token(mask, token)

    def advance(self, tokens: Sequence[int]) -> None:
        """Follow tokens that were committed. A matcher that ran into a limit is led to them by the next look."""
        path = tuple(tokens)
        with self._lock:
            if path != self._path and not self._walk(path) and not self._matcher.is_error():
                self._lost = True
            self._committed += path
            told, forced = self._told
            self.forced = tuple(forced) if told == path else self._forced_here()
            self._path, self._told = (), ((), self.forced)
            self._fitting.clear()
            if self._masks:
                self._masks = {key[len(path) :]: mask for key, mask in self._masks.items() if key[: len(path)] == path}

    def forced_behind(self, path: Path, limit: int) -> Path:
        """List the tokens that must follow a path which fits, at most `limit`."""
        with self._lock:
            return self._forced_here()[:limit] if self._walk(path) else ()

    def _forced_here(self) -> Path:
        """List the tokens that are forced where the matcher is."""
        return () if self._lost else tuple(self._matcher.compute_ff_tokens())

    def _allowed_last(self, path: Path) -> bool:
        """Return True if the last token of `path` fits, whether or not anything may follow it."""
        before = self._masks.get(path[:-1])
        return before is not None and has_token(before, path[-1])

    def _fits_as_drawn(self, path: Path) -> tuple[int, Finish | None]:
        """Answer `fits` for tokens that were drawn with their masks, so that a text which could only end there goes on
        with an end. The mask behind the last token is not needed. A matcher at a limit says nothing: the next look at
        it finds out."""
        with self._lock:
            if not self._grammars.eos_ids.isdisjoint(path):
                mask = self._look(path[: (count := self._first_end(path))])
                if mask is not None and not self.goes_on(mask):
                    return count, Finish.STOP
            fits, stopped = path == self._path or self._walk(path), self._matcher.is_stopped()
            if stopped and self._matcher.is_error():
                return len(path), None
            if not fits:
                return len(self._path), Finish.ERROR
            return len(path), Finish.STOP if stopped else None

    def _first_end(self, path: Path) -> int:
        """Return the place of the first end-of-sequence token, or of the end of the path if there is none."""
        return next((i for i, token in enumerate(path) if token in self._grammars.eos_ids), len(path))

    def _look(self, path: Path) -> np.ndarray | None:
        """Return a mask. An error may come from earlier queries, so only one after a fresh start counts."""
        if path not in self._masks and not self._attempt(path):
            self._renew()
            if not self._attempt(path):
                self._masks[path] = None
        return self._masks[path]

    def _fill_along(self, branches: Sequence[Branch], sheet: MaskSheet) -> None:
        """Write the masks of branches, each in one call from where it leaves those before it."""
        done: set[int] = set()
        for tokens, rows in branches:
            before: Path = ()
            if done and (start := _shared(rows, done)):
                before, tokens, rows = tokens[:start], tokens[start:], rows[start:]
            if before == self._path or self._walk(before):  # else all rows are behind a token that does not fit
                self._grammars.masks_along(self._matcher, tokens, sheet, sheet.take(rows))
            if len(branches) > 1:
                done.update(rows)

    def _fill_one_by_one(self, branches: Sequence[Branch], sheet: MaskSheet) -> None:
        """Write masks of which a worker has computed the first. The draft is laid out: no other waits for a worker."""
        for tokens, rows in branches:
            sheet.put(rows, [self._look(tokens[:count]) for count in range(len(rows))])

    def _attempt(self, path: Path) -> bool:
        """Compute a mask with the matcher as it is. False: it has run into a limit."""
        began = time.thread_time()
        mask = None if self._lost or not self._walk(path) else self._grammars.mask(self._matcher)
        self._seconds = time.thread_time() - began
        if self._matcher.is_error() and not self._lost:
            return False
        self._masks[path] = mask
        return True

    def _walk(self, path: Path) -> bool:
        """Move the matcher to the end of `path`. False: the path does not fit, and it stopped where it last did."""
        if path == self._path:
            return True
        shared = 0
        if self._path:
            while shared < min(len(path), len(self._path)) and path[shared] == self._path[shared]:
                shared += 1
            if shared < len(self._path):
                self._matcher.rollback(len(self._path) - shared)
        taken = self._matcher.try_consume_tokens([*path[shared:]])
        self._path = path[: shared + taken]
        return shared + taken == len(path)

    def _renew(self) -> None:
        """Start over with a freshly compiled grammar, which has not run into a limit yet."""
        self._renewals += 1
        self._path = ()
        if self._renewals > MAX_RENEWALS:
            self._lost = True
            return
        self._matcher, _ = self._grammars.fresh(self._grammar, anew=True)
        self._lost = not self._replay()

    def _replay(self) -> bool:
        """Lead a fresh matcher along the committed tokens. The limits of llguidance bound each query alone: a mask may
        need more at once than in the steps in which masks of the text before it were computed."""
        far, near = self._committed[:-REPLAYED_MASKS], self._committed[-REPLAYED_MASKS:]
        if self._matcher.try_consume_tokens(far) < len(far):
            return False
        for token in near:
            self._grammars.mask(self._matcher)
            if not self._matcher.try_consume_tokens([token]):
                return False
        return True


def _shared(rows: Sequence[int], done: Collection[int]) -> int:
    """Return the place in a branch of the last row that is done already, where it leaves the branches before it."""
    place = 0
    while place + 1 < len(rows) and rows[place + 1] in done:
        place += 1
    return place
