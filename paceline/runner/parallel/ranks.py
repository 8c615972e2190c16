"""The workers of rank 0: processes that it starts, calls and ends, and what it says when one is lost.

A worker that dies breaks a connection, which every other rank notices at once. One that is stuck is noticed after
`timeout` seconds in a pass and between passes, and while it reads weights once it has not got on for LOAD_SECONDS.
Then all workers are killed, and every later call raises the same error: nothing waits for ever.

Calls may come from several threads, such as a drafter's beside the engine's. A lock keeps each call whole, so all ranks
run the same calls in the same order.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

from paceline import errors
from paceline.errors import NoAnswer, PacelineError, RankLost
from paceline.kernels.cpu.segment import new_segment
from paceline.runner.loading.memory import available_memory
from paceline.runner.parallel.exchange import Exchange, join
from paceline.runner.parallel.messages import (
    PACKAGE,
    Assemble,
    Busy,
    Call,
    Failed,
    Free,
    Hello,
    Join,
    Lead,
    Load,
    Loaded,
    Message,
    Ping,
    Pipe,
    Pong,
    flat,
    versions,
)

WORKER = (sys.executable, "-m", "paceline.runner.parallel.worker")
START_SECONDS = 120.0  # time for a worker to import torch, on a busy machine with cold disks
LOAD_SECONDS = 60.0  # time in which a worker that reads weights has computed, read or written something
POLL_SECONDS = 0.05
LAST_WORDS_SECONDS = 1.0  # time in which the cause of a loss becomes known; if all but one rank ended, it is that one
LEAVE_SECONDS = 2.0  # time for workers to end by themselves
TELLING = ("OutOfMemory", "ModelFileError", "ModelNotFound", "UnsupportedModel")  # errors that keep their class
T = TypeVar("T")
Order = TypeVar("Order", Load, Lead, Assemble)


class Worker:
    """A process of another rank, seen from rank 0."""

    def __init__(self, rank: int, command: Sequence[str], *, timeout: float, memory: int | None = None) -> None:
        """`memory`: descriptor of the memory that all ranks share, which the process inherits."""
        inherited = [] if memory is None else [memory]
        mine, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno(), *inherited],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_environment(os.environ),
                start_new_session=True,  # Ctrl-C is for rank 0, which may still have requests to finish
            )
        self.rank = rank
        self.pipe = Pipe(mine.detach(), timeout=timeout)

    def take(self) -> Message:
        """Return the message that is there. Raises the worker's own error if it failed, and RankLost if it ended."""
        try:
            message = self.pipe.receive()
        except (EOFError, OSError):
            raise RankLost(f"rank {self.rank} {self.ending or 'closed its pipe'}") from None
        if isinstance(message, Failed):
            raise self.error(message)
        return message

    def error(self, failed: Failed) -> PacelineError:
        kind: type[PacelineError] = getattr(errors, failed.kind) if failed.kind in TELLING else RankLost
        return kind(f"rank {self.rank} failed: {failed.text}")

    @property
    def ending(self) -> str | None:
        """Say how the process ended; None: it has not."""
        try:
            status = self.process.wait(LAST_WORDS_SECONDS if self.pipe.poll() else 0)
        except subprocess.TimeoutExpired:
            return None
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"

    def last_words(self) -> Message | None:
        try:
            return self.pipe.receive() if self.pipe.poll() else None
        except (EOFError, OSError):
            return None


def hear(workers: Sequence[Worker], kind: type[T], *, seconds: float, late: str) -> list[T]:
    """Wait for a message of each worker, in the order in which they come: the first that fails is heard at once.

    Raises the worker's own error if it failed, and RankLost if it ended or is late, which `late` says in words."""
    until = time.monotonic() + seconds
    heard: dict[int, T] = {}
    while silent := [worker for worker in workers if worker.rank not in heard]:
        ready = wait([worker.pipe.fileno() for worker in silent], max(0.0, until - time.monotonic()))
        if not ready:
            raise RankLost(f"rank {silent[0].rank} {late} {seconds:g} s")
        for worker in (worker for worker in silent if worker.pipe.fileno() in ready):
            message = worker.take()
            assert isinstance(message, kind), f"rank {worker.rank} sent {message}"
            heard[worker.rank] = message
    return [heard[worker.rank] for worker in workers]


class Loading:
    """Workers that read their parts of a model, while rank 0 reads its own."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        now = time.monotonic()
        self._heard = dict.fromkeys(workers, now)  # those that have not finished, and their last message

    def look(self, seconds: float = 0.0) -> None:
        """Take what workers say; wait `seconds` for each. Raises RankLost if one ended, or has not got on for long."""
        for worker in list(self._heard):
            while worker in self._heard and worker.pipe.poll(seconds):
                message = worker.take()
                assert isinstance(message, Busy | Loaded), f"rank {worker.rank} sent {message}"
                self._heard[worker] = time.monotonic()
                if isinstance(message, Loaded):
                    del self._heard[worker]
            if time.monotonic() - self._heard.get(worker, math.inf) > LOAD_SECONDS:
                raise RankLost(f"rank {worker.rank} is stuck: no progress with its weights for {LOAD_SECONDS:g} s")

    def wait(self) -> None:
        """Return when all workers have finished."""
        while self._heard:
            self.look(POLL_SECONDS)


class Ranks:
    """All ranks of one machine, seen from rank 0. Ended by `close`, with this process, or when nobody refers to it."""

    def __init__(
        self,
        size: int,
        *,
        threads: int,
        timeout: float = 8.0,
        meeting: float | None = None,
        command: Sequence[str] = WORKER,
    ) -> None:
        """Start the workers and connect them. `timeout`: seconds that a message to a rank may take; `meeting`: one
        between ranks, if they wait for each other longer."""
        self.size, self.threads, self.timeout = size, threads, timeout
        self._meeting = meeting or timeout
        self.lost: str | None = None  # why no more calls are possible
        self._lock = threading.RLock()
        self._keys = itertools.count()
        folder = tempfile.mkdtemp(prefix="paceline-ranks-")
        self._workers: list[Worker] = []
        self.close = weakref.finalize(self, _end, self._workers, folder)
        self.memory = [available_memory()]  # bytes that each rank finds free
        memory = new_segment(size)
        try:
            self.exchange = self._guarded(lambda: self._meet(Path(folder) / "store", command, memory))
        finally:
            os.close(memory)  # mapped by now

    def load(
        self, load: Callable[[int], Order], mine: Callable[[Order, Exchange, Callable[[], None]], T]
    ) -> tuple[int, T]:
        """Have every rank make a model at the same time: the workers theirs, and rank 0 its own part by `mine`, which
        calls its last argument now and then: that raises if a worker is lost."""

        def everywhere() -> tuple[int, T]:
            order = load(next(self._keys))
            self._tell(order)
            loading = Loading(self._workers)
            part = mine(order, self.exchange, loading.look)
            loading.wait()
            return order.key, part

        return self._guarded(everywhere)

    def call(self, key: int, method: str, arguments: Sequence[Any], mine: Callable[..., T]) -> T:
        """Run a method of a model on all ranks, and return what it returns on rank 0, where it is `mine`."""

        def everywhere() -> T:
            self._tell(Call(key, method, tuple(map(flat, arguments))))
            return mine(*arguments)

        return self._guarded(everywhere)

    def free(self, key: int) -> None:
        """Let the workers forget a model. Nothing is to be done if they have gone."""
        with self._lock, suppress(RankLost):
            if self.close.alive:
                self._guarded(lambda: self._tell(Free(key)))

    def check(self) -> None:
        """Raise RankLost if a worker has ended, or does not answer within `timeout`. No pass may be under way."""

        def all_there() -> None:
            self._tell(Ping())
            hear(self._workers, Pong, seconds=self.timeout, late="is stuck: no answer for")

        self._guarded(all_there)

    def guarded(self, work: Callable[[], T]) -> T:
        """Do something in which the ranks meet without a message. A failure ends all of them, as one in `call` does."""
        return self._guarded(work)

    def watch(self, lost: Callable[[], None]) -> None:
        """Call `lost` once, from another thread, when a worker has ended by itself."""
        processes = [os.pidfd_open(worker.process.pid) for worker in self._workers]
        ended = weakref.ref(self)

        def wait_for_one() -> None:
            wait(processes)
            for process in processes:
                os.close(process)
            ranks = ended()
            if ranks is not None and ranks.close.alive:
                lost()

        threading.Thread(target=wait_for_one, name="ranks", daemon=True).start()

    def pids(self) -> Mapping[int, int]:
        """Return the process of each worker by its rank."""
        return {worker.rank: worker.process.pid for worker in self._workers}

    def _meet(self, store: Path, command: Sequence[str], memory: int) -> Exchange:
        for rank in range(1, self.size):
            try:
                self._workers.append(Worker(rank, command, timeout=self.timeout, memory=memory))
            except OSError as error:
                raise RankLost(f"rank {rank} cannot be started: {error.strerror or error}") from error
        hellos = hear(self._workers, Hello, seconds=START_SECONDS, late="has not started within")
        for worker, hello in zip(self._workers, hellos, strict=True):
            if hello.versions != versions():
                theirs, mine = ", ".join(hello.versions), ", ".join(versions())
                raise RankLost(f"rank {worker.rank} runs {theirs}, and rank 0 {mine}: all ranks need the same versions")
            self.memory.append(hello.memory)
        for worker in self._workers:
            worker.pipe.send(Join(worker.rank, self.size, str(store), self._meeting, self.threads, memory))
        pipes = [worker.pipe.fileno() for worker in self._workers]
        return join(store, rank=0, size=self.size, timeout=self._meeting, memory=memory, pipes=pipes)

    def _tell(self, message: Message) -> None:
        for worker in self._workers:
            try:
                worker.pipe.send(message)
            except OSError as error:
                raise NoAnswer(f"rank {worker.rank} takes no messages ({error.strerror or error})") from error

    def _guarded(self, work: Callable[[], T]) -> T:
        """Do something that all ranks take part in. After any failure they are no longer in step, and all are ended."""
        with self._lock:
            if self.lost is not None:
                raise RankLost(self.lost)
            try:
                return work()
            except BaseException as error:
                self.lost = self._cause(error)
                for worker in self._workers:
                    worker.process.kill()
                self.close()
                if isinstance(error, RankLost):
                    raise RankLost(self.lost) from error
                raise

    def _cause(self, error: BaseException) -> str:
        """Say which rank was lost first, and how: those that notice it end, too."""
        if not isinstance(error, NoAnswer):
            return str(error) if isinstance(error, RankLost) else f"{type(error).__name__}: {error}"
        until = time.monotonic() + LAST_WORDS_SECONDS
        while time.monotonic() < until and not (error.silent and len(self._running) == 1):
            for worker in self._workers:
                status = worker.process.poll()
                if status is not None and status < 0:
                    return f"rank {worker.rank} {worker.ending}"
                words = worker.last_words() if status else None
                if isinstance(words, Failed) and words.kind != NoAnswer.__name__:
                    return str(worker.error(words))
            time.sleep(POLL_SECONDS)
        stuck = self._running
        return f"rank {stuck[0].rank} is stuck: no answer for {self.timeout:g} s" if stuck else str(error)

    @property
    def _running(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.process.poll() is None]


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Let a worker find this very package, wherever it was imported from."""
    root = str(PACKAGE.parent)
    paths = [root, *filter(None, [environ.get("PYTHONPATH")])]
    return {**environ, "PYTHONPATH": os.pathsep.join(paths)}


def _end(workers: Sequence[Worker], folder: str) -> None:
    """Close the pipes, which ends workers that wait for a message, and kill those that do not end."""
    for worker in workers:
        worker.pipe.close()
    until = time.monotonic() + LEAVE_SECONDS
    for worker in workers:
        try:
            worker.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
    shutil.rmtree(folder, ignore_errors=True)
