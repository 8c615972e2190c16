"""A record of a share of the requests, for `paceline audit` and `paceline replay`. Off unless a file is named.

A request has a line when it is taken: its id, the time, the model, the prompt's token ids and the sampling parameters,
with the seed if the client gave one; no key, no address. Each of its answers has a line when it ends: why, how long it
is, the counts and times of its sequence, and when its first token was there to be sent; no token of it. A prompt can be
read from its tokens, so only the owner of the file can read it. Without `text` there are no token ids, no stop strings
and no grammar: the prompt is a length.

`pages` are names of the full KV pages of a text. Equal beginnings have equal names, by which a replay finds prefixes
that the cache had. A name is a hash with a key that is drawn at the start and kept nowhere: no text follows from it.

If a write fails, recording ends; requests go on. A line is whole or not there: what a full disk took of one is removed
again, and a line that a crash has torn is removed when the next server opens the file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import random
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from paceline.errors import StorageError
from paceline.kernels.base import PAGE_SIZE
from paceline.prompts.files import is_torn
from paceline.server import logs
from paceline.types import Request, SamplingParams, SequenceStats, TokenEvent

NAME_BYTES = 8  # of a page's name: two of a million pages have the same one with probability 3e-8
TEXTS = ("logit_bias", "allowed_tokens", "stop", "stop_ids", "grammar")  # parameters that tell of a text
COUNTS = ("cached_tokens", "steps", "rounds", "drafted", "accepted", "accepted_by_position", "drafter", "preemptions")
TIMES = ("time_queued", "time_to_first", "time_total", "time_draft", "time_verify")
FIRST_SENT = "time_first_sent"  # seconds from the HTTP request to the first token on the event loop, which sends it


@dataclass(slots=True)
class _Open:
    """A recorded request that has not ended: the tokens of its answers so far, by sample."""

    request: Request
    began: float | None  # when its HTTP request came, on `time.perf_counter`; None: it came by no HTTP
    answers: dict[int, list[int]] = field(default_factory=dict)
    sent: dict[int, float] = field(default_factory=dict)  # sample → seconds until its first token was there
    ended: int = 0  # samples


class Recorder:
    def __init__(
        self,
        path: str,
        *,
        share: float,
        model: str = "",
        text: bool = True,
        draw: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`model`: the served name. `text` False: no token ids are kept. `clock`: seconds since 1970. `timer`: that of
        `logs.Record.began`."""
        self._share = share
        self._model = model
        self._text = text
        self._draw = draw
        self._clock = clock
        self._timer = timer
        self._key = os.urandom(16)
        self._open: dict[str, _Open] = {}
        try:
            self._file: int | None = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            _mend(self._file)
        except OSError as error:
            reason = error.strerror or str(error)
            raise StorageError(f"requests cannot be recorded in {path} ({reason}); choose another file") from None

    def take(self, request: Request) -> None:
        """Record a request that the engine has been asked to serve, if it makes text and the draw selects it."""
        if self._file is None or request.pooling is not None or self._draw() >= self._share:
            return
        current = logs.current.get()
        self._open[request.id] = _Open(request, None if current is None else current.began)
        self._write(self._taken(request))

    def hear(self, event: TokenEvent) -> None:
        """Record the end of an answer to a recorded request."""
        opened = self._open.get(event.request_id)
        if opened is None:
            return
        if opened.began is not None and event.tokens and event.sample not in opened.sent:
            opened.sent[event.sample] = self._timer() - opened.began
        answer = opened.answers.setdefault(event.sample, [])
        answer += event.tokens
        if event.finish is None:
            return
        opened.ended += 1
        if opened.ended == opened.request.sampling.n:
            del self._open[event.request_id]
        self._write(self._ended(opened, event, answer))

    def _taken(self, request: Request) -> dict[str, Any]:
        line = {"id": request.id, "at": round(self._clock(), 6), "model": self._model, "share": self._share}
        pages = page_names(request.prompt, key=self._key, salt=request.cache_salt)
        sampling = asked(request.sampling)
        if self._text:
            return line | {"prompt_tokens": request.prompt, "sampling": sampling, "pages": pages}
        line |= {"prompt_length": len(request.prompt), "pages": pages}
        return line | {"sampling": {name: value for name, value in sampling.items() if name not in TEXTS}}

    def _ended(self, opened: _Open, event: TokenEvent, answer: Sequence[int]) -> dict[str, Any]:
        request, stats, sent = opened.request, event.stats or SequenceStats(), opened.sent.get(event.sample)
        pages = page_names((*request.prompt, *answer), key=self._key, salt=request.cache_salt)
        return {
            "id": request.id,
            "sample": event.sample,
            "ended": event.finish,
            "output_tokens": len(answer),
            "pages": pages[len(request.prompt) // PAGE_SIZE :],
            **{name: getattr(stats, name) for name in COUNTS},
            **{name: round(getattr(stats, name), 6) for name in TIMES},
            **({} if sent is None else {FIRST_SENT: round(sent, 6)}),
        }

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            _append(self._file, f"{json.dumps(line)}\n".encode())
        except OSError as error:
            logs.say("requests are no longer recorded", level=logging.WARNING, reason=str(error))
            os.close(self._file)
            self._file = None
            self._open.clear()


def page_names(tokens: Sequence[int], *, key: bytes = b"", salt: str = "") -> list[str]:
    """Name every full page of a text by a hash of all tokens up to its end. `salt`: the request's, as in the cache."""
    previous, names = hashlib.blake2b(salt.encode(), key=key, digest_size=32).digest(), []
    for end in range(PAGE_SIZE, len(tokens) + 1, PAGE_SIZE):
        page = array("q", tokens[end - PAGE_SIZE : end]).tobytes()
        previous = hashlib.blake2b(page, key=previous, digest_size=32).digest()
        names.append(previous[:NAME_BYTES].hex())
    return names


def _append(file: int, line: bytes) -> None:
    """Write a line in one call. If only a part of it fits, remove that part and raise OSError."""
    before = os.fstat(file).st_size
    written = os.write(file, line)
    if written < len(line):
        os.ftruncate(file, before)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _mend(file: int) -> None:
    """Remove a recorded line without an end. A last line that is not from here only gets its missing end."""
    size = os.fstat(file).st_size
    if not size or os.pread(file, 1, size - 1) == b"\n":
        return
    with open(os.dup(file), "rb") as whole:
        whole.seek(0)
        [last] = deque(whole, maxlen=1)
    if is_torn(last):
        os.ftruncate(file, size - len(last))
    else:
        _append(file, b"\n")


def asked(sampling: SamplingParams) -> dict[str, Any]:
    """Collect the parameters that are not at their defaults."""
    usual = SamplingParams()
    values = {field.name: getattr(sampling, field.name) for field in fields(sampling)}
    found = {name: value for name, value in values.items() if value != getattr(usual, name)}
    if sampling.grammar is not None:
        found["grammar"] = asdict(sampling.grammar)
    return found
