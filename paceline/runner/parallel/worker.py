"""A rank above 0 as a process: it joins the group, reads its shards, and runs the passes that rank 0 calls for.

It decides nothing. It ends when its pipe to rank 0 is closed, also if rank 0 was killed, and when another rank is lost
in the middle of a pass. Ctrl-C is left to rank 0.

While it reads shards it sends Busy as long as the process gets on: it computes, reads or writes. A slow disk is no
reason to end it, and a disk that answers no more is.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.errors import RankLost
from paceline.runner.loading.memory import available_memory
from paceline.runner.parallel.exchange import Exchange, join
from paceline.runner.parallel.messages import (
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
    Ping,
    Pipe,
    Pong,
    versions,
    whole,
)
from paceline.runner.parallel.part import load_part, use_threads

BUSY_SECONDS = 1.0  # time between two looks whether this process gets on
BUSY_CPU_SECONDS = 0.01  # work that counts as getting on
ORPHAN_SECONDS = 2.0  # time to leave by itself once rank 0 has gone
Assembling = Callable[[Assemble, Exchange], object]
"""Makes the models of an engine on this rank's GPU, with the methods that rank 0 calls."""


def main(descriptor: int, assemble: Assembling | None = None) -> int:
    """Work until rank 0 has no more need of it, and return the status of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = Pipe(descriptor)
    try:
        pipe.send(Hello(versions(), available_memory()))
        serve(pipe, assemble)
    except (EOFError, ConnectionError):  # rank 0 has gone, or closed the pipe
        return 0
    except Exception as error:  # of any kind: rank 0 has to hear of it
        with suppress(OSError):
            pipe.send(Failed(type(error).__name__, str(error)))
        return 1
    raise AssertionError("a worker serves until its pipe is closed")


def serve(pipe: Pipe, assemble: Assembling | None = None) -> None:
    """Do what messages say. Raises EOFError at the end of the pipe."""
    joining = pipe.receive()
    assert isinstance(joining, Join), f"{joining} comes before a rank has joined"
    use_threads(joining.threads)
    exchange = join(
        Path(joining.store),
        rank=joining.rank,
        size=joining.size,
        timeout=joining.timeout,
        memory=joining.memory,
        pipes=[pipe.fileno()],
    )
    models: dict[int, tuple[Load | Assemble, Any]] = {}
    while True:
        _obey(pipe, exchange, models, assemble)


def _obey(
    pipe: Pipe, exchange: Exchange, models: dict[int, tuple[Load | Assemble, Any]], assemble: Assembling | None
) -> None:
    match pipe.receive():
        case Assemble() as whole_engine if assemble is not None:
            with _saying_busy(pipe):
                models[whole_engine.key] = whole_engine, assemble(whole_engine, exchange)
            pipe.send(Loaded())
        case Load() as load:
            with _saying_busy(pipe):
                models[load.key] = load, load_part(load, exchange)
            pipe.send(Loaded())
        case Lead(key, whole_key, layers):
            order, part = models[whole_key]
            with _saying_busy(pipe):
                models[key] = order, part.leading(layers)
            pipe.send(Loaded())
        case Call(key, method, arguments):
            order, part = models[key]
            use_threads(order.torch_threads)  # models may differ
            getattr(part, method)(*map(whole, arguments))
        case Free(key):
            models.pop(key, None)
        case Ping():
            pipe.send(Pong())
        case other:
            raise RankLost(f"a worker does not know what to do with {other}")


@contextmanager
def _saying_busy(pipe: Pipe) -> Iterator[None]:
    """Tell rank 0 of progress, from a thread that sends nothing more once the block has ended."""
    over = threading.Event()

    def look() -> None:
        before = _progress()
        while not over.wait(BUSY_SECONDS):
            now = _progress()
            if now[0] - before[0] > BUSY_CPU_SECONDS or now[1] > before[1]:
                before = now
                with suppress(OSError):  # rank 0 has gone: the main thread finds out
                    pipe.send(Busy())

    thread = threading.Thread(target=look, name="busy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _progress() -> tuple[float, int]:
    """Return the seconds that all threads but this one have computed, and the blocks that were read or written."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return time.process_time() - time.thread_time(), used.ru_inblock + used.ru_oublock + used.ru_majflt


def end_with(descriptor: int, status: int = 1) -> None:
    """End this process soon after the other side of a pipe has gone, whatever its main thread is stuck in."""

    def wait() -> None:
        poll = select.poll()
        poll.register(descriptor, 0)  # its end alone
        poll.poll()
        time.sleep(ORPHAN_SECONDS)
        os._exit(status)

    threading.Thread(target=wait, name="orphan", daemon=True).start()


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    sys.exit(main(int(sys.argv[1])))
