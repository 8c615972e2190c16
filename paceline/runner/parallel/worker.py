"""A rank above 0 as a process: it joins the group, reads its shards, and runs the passes that rank 0 calls for.

It decides nothing. It ends when its pipe to rank 0 is closed, also if rank 0 was killed, and when another rank is lost
in the middle of a pass. Ctrl-C is left to rank 0.
"""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from pathlib import Path

from paceline.errors import RankLost
from paceline.runner.loading.memory import available_memory
from paceline.runner.parallel.exchange import Exchange, join
from paceline.runner.parallel.messages import Call, Failed, Free, Hello, Join, Load, Loaded, Pipe, versions, whole
from paceline.runner.parallel.part import Part, load_part, use_threads


def main(descriptor: int) -> int:
    """Work until rank 0 has no more need of it, and return the status of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = Pipe(descriptor)
    try:
        pipe.send(Hello(versions(), available_memory()))
        serve(pipe)
    except (EOFError, ConnectionError):  # rank 0 has gone, or closed the pipe
        return 0
    except Exception as error:  # of any kind: rank 0 has to hear of it
        with suppress(OSError):
            pipe.send(Failed(type(error).__name__, str(error)))
        return 1
    raise AssertionError("a worker serves until its pipe is closed")


def serve(pipe: Pipe) -> None:
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
    models: dict[int, Part] = {}
    while True:
        _obey(pipe, exchange, models)


def _obey(pipe: Pipe, exchange: Exchange, models: dict[int, Part]) -> None:
    match pipe.receive():
        case Load() as load:
            models[load.key] = load_part(load, exchange)
            pipe.send(Loaded())
        case Call(key, method, arguments):
            getattr(models[key], method)(*map(whole, arguments))
        case Free(key):
            models.pop(key, None)
        case other:
            raise RankLost(f"a worker does not know what to do with {other}")


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
