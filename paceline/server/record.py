"""A record of a share of the requests, for `paceline audit` to replay. Off unless the operator names a file.

A line has the id, the prompt's token ids and the sampling parameters, with the seed if the client gave one; no key, no
address, no answer. A prompt can be read from its tokens, so only the owner of the file can read it. If a write fails,
recording ends; requests go on.
"""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

from paceline.errors import StorageError
from paceline.server import logs
from paceline.types import Request, SamplingParams


class Recorder:
    def __init__(self, path: str, *, share: float, draw: Callable[[], float] = random.random) -> None:
        self._share = share
        self._draw = draw
        try:
            self._file: int | None = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            reason = error.strerror or str(error)
            raise StorageError(f"requests cannot be recorded in {path} ({reason}); choose another file") from None

    def take(self, request: Request) -> None:
        """Record a request that the engine has been asked to serve, if it makes text and the draw selects it."""
        if self._file is None or request.pooling is not None or self._draw() >= self._share:
            return
        line = {"id": request.id, "prompt_tokens": request.prompt, "sampling": asked(request.sampling)}
        try:
            os.write(self._file, f"{json.dumps(line)}\n".encode())  # in one write, so that a line is whole or absent
        except OSError as error:
            logs.say("requests are no longer recorded", level=logging.WARNING, reason=str(error))
            self._file = None


def asked(sampling: SamplingParams) -> dict[str, Any]:
    """Collect the parameters that are not at their defaults."""
    usual = SamplingParams()
    values = {field.name: getattr(sampling, field.name) for field in fields(sampling)}
    found = {name: value for name, value in values.items() if value != getattr(usual, name)}
    if sampling.grammar is not None:
        found["grammar"] = asdict(sampling.grammar)
    return found
