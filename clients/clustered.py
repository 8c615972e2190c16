"""A cluster on Ray in a process of its own, and what can be seen of it from outside: replicas by name and by process.

Its file of options may be changed while it runs. It is told to end when the block ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from served import ROOT, free_port
from wire import Answer, get, send

STARTS = 400.0  # seconds for a cluster to start, on a busy machine
ENDS = 120.0  # seconds for it to drain and end
REPLICA = "x-paceline-replica"


@dataclass(slots=True)
class Clustered:
    process: subprocess.Popen[bytes]
    port: int
    file: Path
    log: Path
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def change(self, cluster: dict[str, Any]) -> None:
        """Write other options of the cluster into the file, and have it read."""
        self.options["cluster"] |= cluster
        write(self.file, self.options)
        self.process.send_signal(signal.SIGHUP)

    @property
    def pids(self) -> list[int]:
        """Processes of this cluster's replicas."""
        name = f"ray::ServeReplica:{self.options['cluster']['name']}:".encode()
        return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if _begins(path, name)]

    async def replicas(self, tries: int = 24) -> set[str]:
        """Names of the replicas that answer."""
        asked = (send(self.port, get("/version")) for _ in range(tries))
        answers = await asyncio.gather(*asked, return_exceptions=True)
        good = [answer for answer in answers if isinstance(answer, Answer) and answer.status == 200]
        return {answer.headers[REPLICA] for answer in good}

    async def until(self, holds: Callable[[], Awaitable[bool]], what: str) -> None:
        end = time.monotonic() + STARTS
        while not await holds():
            if time.monotonic() > end or self.process.poll() is not None:
                raise AssertionError(f"{what}: {self.log.read_text()[-800:]}")
            await asyncio.sleep(0.5)


def _begins(path: Path, name: bytes) -> bool:
    try:
        return path.read_bytes().startswith(name)
    except OSError:  # it has ended
        return False


def write(file: Path, options: dict[str, Any]) -> None:
    file.write_text(json.dumps(options), encoding="utf-8")  # JSON is YAML


@contextmanager
def clustered(python: str, options: dict[str, Any], **cluster: Any) -> Iterator[Clustered]:
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder) / "cluster.yaml", Path(folder) / "log"
        whole = {**options, "port": port, "cluster": {"name": f"show-{os.getpid()}-{port}", **cluster}}
        write(file, whole)
        with log.open("wb") as out:
            command = [python, "-m", "paceline.cli.main", "cluster", "up", str(file)]
            process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield Clustered(process, port, file, log, whole)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(ENDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
