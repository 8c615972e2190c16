"""A record of a share of the requests, for `paceline audit` to replay. Off unless the operator names a file.

A line has the id, the prompt's token ids and the sampling parameters, with the seed if the client gave one; no key, no
address, no answer. A prompt can be read from its tokens, so only the owner of the file can read it. If a write fails,
recording ends; requests go on.

A line is whole or not there: what a full disk took of one is removed again, and a line that a crash has torn is removed
when the next server opens the file.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import random
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

from paceline.errors import StorageError
from paceline.prompts.files import is_torn
from paceline.server import logs
from paceline.types import Request, SamplingParams


class Recorder:
    def __init__(self, path: str, *, share: float, draw: Callable[[], float] = random.random) -> None:
        self._share = share
        self._draw = draw
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
        line = {"id": request.id, "prompt_tokens": request.prompt, "sampling": asked(request.sampling)}
        try:
            _append(self._file, f"{json.dumps(line)}\n".encode())
        except OSError as error:
            logs.say("requests are no longer recorded", level=logging.WARNING, reason=str(error))
            os.close(self._file)
            self._file = None


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
