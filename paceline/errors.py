"""Every error a caller can meet, as one tree, each with the HTTP status a server answers with.

    PacelineError                 500
    ├── InvalidRequest            400  a parameter or prompt that no model could serve
    │   ├── ContextTooLong        400  prompt (plus what was asked for) exceeds the context
    │   └── UnknownOption         400  a misspelt or unknown option; says what was probably meant
    ├── ModelError                500  the model cannot be loaded
    │   ├── ModelNotFound         404  no such path, name or hub id
    │   ├── ModelFileError        500  a file is truncated, states wrong sizes, or misses tensors
    │   ├── UnsupportedModel      500  an architecture or feature Paceline does not know
    │   └── VocabularyMismatch    500  target and drafter do not speak the same tokens
    ├── MissingExtra              500  an optional dependency; says what to install
    ├── NoCompiler                500  the C kernels cannot be built; plain torch runs instead
    ├── OutOfMemory               503  weights or KV cache do not fit
    ├── AbiMismatch               500  the C kernels and their mirror in Python disagree
    ├── StorageError              507  a file cannot be written: the disk is full, or the place is closed
    ├── TrainingError             500  training cannot go on: a loss that is not finite, a process that died
    ├── ProgramError              500  a program failed or was stopped; says in which line
    ├── ClusterError              503  a cluster cannot be started or changed; says why
    ├── EngineDead                503  the engine stopped after an internal error
    ├── RankLost                  503  a process that holds a part of the model died, hangs or does not fit the others
    │   └── NoAnswer              503  a message between two such processes failed; which of them was lost is not known
    ├── UnknownModel              404  a request names a model that this server does not serve
    ├── QueueFull                 429  too many sequences wait; says when to try again
    ├── NotReady                  503  the server is starting, draining or closed
    └── Failed                    any  a request that was taken and could not be completed

A message says what was given, what is allowed, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PacelineError(Exception):
    status = 500


class InvalidRequest(PacelineError, ValueError):
    """A request that cannot be served as it is. `param` names the field of the request that is at fault."""

    status = 400

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextTooLong(InvalidRequest):
    """More tokens than the context holds. `owner_advice` ends the message with a remedy that only the operator of the
    engine has. A server sends its clients `for_client`: the message without it."""

    def __init__(self, message: str, *, param: str | None = None, owner_advice: str = "") -> None:
        super().__init__(message + owner_advice, param=param)
        self.for_client = message


class UnknownOption(InvalidRequest):
    def __init__(self, kind: str, given: str, known: Iterable[str], *, param: str | None = None) -> None:
        names = sorted(known)
        near = difflib.get_close_matches(given, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
        super().__init__(f"unknown {kind} {given!r}; {hint}", param=param)


class ModelError(PacelineError):
    pass


class ModelNotFound(ModelError):
    status = 404


class ModelFileError(ModelError):
    pass


class UnsupportedModel(ModelError):
    pass


class VocabularyMismatch(ModelError):
    pass


class MissingExtra(PacelineError, ImportError):
    """A package of an extra is not installed. The hint is for a clone: no package index has Paceline."""

    def __init__(self, need: str, *, extra: str) -> None:
        super().__init__(f"{need}; in your clone of Paceline type `pip install '.[{extra}]'`")


class NoCompiler(PacelineError):
    """The C kernels cannot be built here. The caller runs plain torch instead and shows this message."""


class OutOfMemory(PacelineError, MemoryError):
    status = 503


class AbiMismatch(PacelineError):
    pass


class StorageError(PacelineError, OSError):
    status = 507


class TrainingError(PacelineError):
    """Training cannot go on: the loss is not finite, or a process that answers prompts has died."""


class ProgramError(PacelineError):
    """A program failed or was stopped. `program` names it, `line` is the line of `file` at which that happened."""

    def __init__(self, message: str, *, program: str, file: str | None = None, line: int | None = None) -> None:
        place = "" if file is None else f", line {line} of {file}"
        super().__init__(f"program {program}{place}: {message}")
        self.program, self.file, self.line = program, file, line


class ClusterError(PacelineError):
    """A cluster cannot be started or changed: its resources, its versions, or a replica that does not start."""

    status = 503


class EngineDead(PacelineError):
    status = 503


class RankLost(PacelineError):
    """A process of a split model died, hangs, or cannot work with the others. Nothing can be computed without it."""

    status = 503


class NoAnswer(RankLost):
    """A message to or from another rank failed. Rank 0 finds out which rank was lost first. `silent`: it came too late,
    and nothing else is wrong with the connection."""

    def __init__(self, message: str, *, silent: bool = False) -> None:
        super().__init__(message)
        self.silent = silent


class UnknownModel(PacelineError):
    status = 404
    code = "model_not_found"
    param = "model"


class QueueFull(PacelineError):
    """The waiting queue is full. Retry after `retry_after` seconds."""

    status = 429
    code = "queue_full"

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class NotReady(PacelineError):
    """The server is starting, draining or closed. `retry_after` estimates the seconds until it has started."""

    status = 503
    code = "not_ready"

    def __init__(self, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Failed(PacelineError):
    """A request that a server took and could not complete. It carries the status and code of its own case."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
