"""What rank 0 and a worker say to each other outside of a pass, and the pipe that carries it.

    worker                              rank 0
    Hello ─────────────────────────────▶         what runs here
          ◀──────────────────────────── Join     be this rank of this group
          ◀──────────────────────────── Load     read your shards of a model, or
          ◀──────────────────────────── Lead     make a model of the first layers of one, or
          ◀──────────────────────────── Assemble on a GPU: read your part of a model, and its drafters
    Busy ──────────────────────────────▶         while it reads: it gets on
    Loaded or Failed ──────────────────▶
          ◀──────────────────────────── Call     one for each pass; nothing is answered
          ◀──────────────────────────── Free     forget a model
          ◀──────────────────────────── Ping     between passes
    Pong ──────────────────────────────▶

A pipe that is closed means that the other side has gone. Messages are pickled: both ends are Paceline's own processes.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import platform
import socket
import struct
from dataclasses import dataclass, fields
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.config import EngineConfig
from paceline.kernels.base import Batch
from paceline.models.weights import Format
from paceline.runner.parallel.split import Split

PACKAGE = Path(__file__).parents[2]
ROOMS = ("accept", "drafters", "engine", "kernels", "kv", "models", "runner", "sampling")  # on which all ranks agree
SOURCES = (".py", ".c", ".h")
SEND_BUFFER = 1 << 20  # bytes that a pipe holds for a worker that is still busy: several passes
UNUSED = ("seeds", "inverse_temperatures", "roots")  # parts of a batch that only a pass which draws tokens reads


@dataclass(frozen=True, slots=True)
class Hello:
    """What runs in a process, and the memory that it finds free."""

    versions: tuple[str, ...]
    memory: int  # bytes


@dataclass(frozen=True, slots=True)
class Join:
    """The place of a process among the ranks."""

    rank: int
    size: int
    store: str  # file in which ranks find each other
    timeout: float  # seconds that a message between ranks may take
    threads: int
    memory: int  # descriptor of the memory that all ranks share


@dataclass(frozen=True, slots=True)
class Load:
    """A model to read, and the memory to set up for it."""

    key: int  # names the model in later messages
    path: str
    format: Format  # resolved
    split: Split
    num_pages: int
    dtype: torch.dtype
    taps: tuple[int, ...]
    threads: int = 1  # of each rank
    max_context: int | None = None  # positions that a compiled program has room for; None: those of the model

    @property
    def torch_threads(self) -> int:
        """Threads of torch in a pass. Beside a compiled program it does little, and its idle threads would spin on the
        kernels' cores."""
        return 1 if self.split.packed else self.threads


@dataclass(frozen=True, slots=True)
class Lead:
    """The first layers of a loaded model as another one, on the same weights and KV memory."""

    key: int  # names them in later messages
    whole: int  # key of the loaded model
    layers: int


@dataclass(frozen=True, slots=True)
class Assemble:
    """An engine's models on several GPUs: each rank has its part of the target, and all of the drafters."""

    key: int  # names it in later messages
    target: str
    format: Format
    seed: int  # of random weights
    drafters: tuple[str, ...]
    config: EngineConfig
    devices: tuple[str, ...]  # of each rank
    torch_threads: int = 1


@dataclass(frozen=True, slots=True)
class Busy:
    """A worker has got on with reading its shards since it last said so."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A worker has the model of a Load, a Lead or an Assemble."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker ends after an error."""

    kind: str  # class of the error
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A method of a loaded model that all ranks run at once."""

    key: int
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Free:
    """A model that is no longer needed."""

    key: int


@dataclass(frozen=True, slots=True)
class Ping:
    """A worker with nothing to do shall answer."""


@dataclass(frozen=True, slots=True)
class Pong:
    """A worker has no more to do, and is there."""


Message = Hello | Join | Load | Lead | Assemble | Busy | Loaded | Failed | Call | Free | Ping | Pong


@cache
def versions() -> tuple[str, ...]:
    """Name the versions that decide on the bits of a pass."""
    digest = hashlib.sha256()
    for room in ROOMS:
        for path in sorted((PACKAGE / room).rglob("*")):
            if path.suffix in SOURCES:
                digest.update(path.read_bytes())
    sources = digest.hexdigest()[:8]
    return f"Paceline's sources {sources}", f"torch {torch.__version__}", f"Python {platform.python_version()}"


class Pipe:
    """One end of the connection between rank 0 and a worker."""

    def __init__(self, descriptor: int, *, timeout: float | None = None) -> None:
        """`timeout`: seconds after which a message that the other side does not take raises OSError."""
        self._connection = Connection(descriptor)
        if timeout is not None:
            limit = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
            with socket.socket(fileno=os.dup(descriptor)) as side:
                side.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
                side.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        self._connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def receive(self) -> Message:
        """Return the next message. Raises EOFError or OSError if the other side has gone."""
        message: Message = pickle.loads(self._connection.recv_bytes())
        return message

    def poll(self, seconds: float = 0.0) -> bool:
        """Wait for a message, or for the end of the other side."""
        return self._connection.poll(seconds)

    def close(self) -> None:
        self._connection.close()


def flat(value: Any) -> Any:
    """Turn tensors into arrays: plain pickles of tensors take ten times as long."""
    if isinstance(value, Batch):
        parts = {field.name: getattr(value, field.name) for field in fields(Batch) if field.name not in UNUSED}
        return {name: flat(part) for name, part in parts.items()}
    return value.numpy() if isinstance(value, Tensor) else value


def whole(value: Any) -> Any:
    """Invert `flat`."""
    if isinstance(value, dict):
        return Batch(**{name: whole(part) for name, part in value.items()})
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value
