"""Workers for tests that do not do their part: a process that follows a script, and signals in the middle of a pass."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading

from paceline.kernels.base import Batch, Output
from paceline.runner.parallel.forward import SplitForward
from paceline.runner.parallel.messages import Message

FAKE = """
import sys, time
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[-1]))
for word in sys.argv[1:-1]:
    if word == "ends":
        sys.exit(1)
    elif word == "listens":
        pipe.recv_bytes()
    else:
        pipe.send_bytes(bytes.fromhex(word))
time.sleep(60)
"""


def fake(*words: Message | str) -> list[str]:
    """The command of a worker that says this and then nothing. Words: it "listens" to a message, "ends"."""
    spelt = [word if isinstance(word, str) else pickle.dumps(word).hex() for word in words]
    return [sys.executable, "-c", FAKE, *spelt]


class Interrupts:
    """Sends a worker signals before and while rank 0 runs a pass, and so waits for the worker's sums."""

    def __init__(self, forward: SplitForward, pid: int, *, after: int, number: signal.Signals) -> None:
        self._compute, self._pid, self._after, self._number = forward._part.compute, pid, after, number
        forward._part.compute = self._stopped  # type: ignore[method-assign]

    def _stopped(self, batch: Batch) -> Output | None:
        self._after -= 1
        if self._after == 0:
            os.kill(self._pid, signal.SIGSTOP)
            threading.Timer(0.3, os.kill, (self._pid, self._number)).start()
        return self._compute(batch)
