"""A watcher beside a load, in a process of its own so that the load's work does not delay it.

python clients/soak_watch.py health PORT     asks /health every 20 ms, each time by a new connection
python clients/soak_watch.py stream PORT     reads one stream after the other

Watches until its input ends, and prints JSON: how often, the longest time that it waited, and the longest that the
machine kept this process itself from running.
"""

from __future__ import annotations

import http.client
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from prompts import CHAT
from wire import HOST, JSON

PAUSE = 0.02  # seconds between two questions
PATIENCE = 120.0  # seconds for an answer
STORY = {
    "messages": [{"role": "user", "content": "Tell a long story about a lighthouse."}],
    "max_tokens": 300,
    "ignore_eos": True,
    "stream": True,
    "seed": 1,
}


def health(port: int) -> Iterator[float]:
    """Yield the seconds of each answer."""
    while True:
        began = time.perf_counter()
        connection = http.client.HTTPConnection(HOST, port, timeout=PATIENCE)
        connection.request("GET", "/health", headers={"Connection": "close"})
        status = connection.getresponse().read() and 200
        connection.close()
        if status == 200:
            yield time.perf_counter() - began
        time.sleep(PAUSE)


def stream(port: int) -> Iterator[float]:
    """Yield the seconds between two chunks of a stream."""
    while True:
        connection = http.client.HTTPConnection(HOST, port, timeout=PATIENCE)
        connection.request("POST", CHAT, json.dumps(STORY), JSON)
        answer = connection.getresponse()
        last = None
        while line := answer.readline():
            if line.startswith(b"data: "):
                now = time.perf_counter()
                if last is not None:
                    yield now - last
                last = now
        connection.close()


class Overslept(threading.Thread):
    """Finds the longest time by which this process woke up too late: the machine's part in what it measures."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest = 0.0

    def run(self) -> None:
        while True:
            began = time.perf_counter()
            time.sleep(0.005)
            self.longest = max(self.longest, time.perf_counter() - began - 0.005)


def main() -> None:
    watch = {"health": health, "stream": stream}[sys.argv[1]]
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    overslept = Overslept()
    overslept.start()
    waits: list[float] = []
    for wait in watch(int(sys.argv[2])):
        waits.append(wait)
        if ended.is_set():
            break
    print(json.dumps(summary(waits, overslept.longest)))


def summary(waits: list[float], overslept: float) -> dict[str, Any]:
    return {
        "count": len(waits),
        "median_ms": round(1000 * statistics.median(waits), 1),
        "max_ms": round(1000 * max(waits), 1),
        "overslept_ms": round(1000 * overslept, 1),
    }


if __name__ == "__main__":
    main()
