"""A server with SmolLM2 in a process of its own, and what can be seen of it from outside: log, descriptors, memory.

The log is JSON lines in a temporary file. The server is told to end when the block ends; one that does not is killed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PROGRAM = ("-m", "paceline.cli.main")
STARTS = 120.0  # seconds for a server to start
ENDS = 40.0  # seconds for it to end


@dataclass(frozen=True, slots=True)
class Served:
    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.root}/v1"

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def get(self, path: str, headers: dict[str, str] | None = None) -> str:
        with urllib.request.urlopen(urllib.request.Request(self.root + path, headers=headers or {}), timeout=30) as it:
            text: str = it.read().decode()
            return text

    def metric(self, name: str, headers: dict[str, str] | None = None) -> float:
        """The sum over a metric's labels."""
        lines = [
            line for line in self.get("/metrics", headers).splitlines() if line.startswith((name + "{", name + " "))
        ]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def speculation(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self.get("/v1/speculation"))
        return state

    def lines(self) -> list[dict[str, Any]]:
        """Of the log, as far as they are JSON."""
        found = [line for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [json.loads(line) for line in found]

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @property
    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    @property
    def memory(self) -> int:
        """Resident KiB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))


@contextmanager
def served(
    python: str, *options: str, program: tuple[str, ...] = (), model: str = "smollm2", wait: bool = True
) -> Iterator[Served]:
    """`wait`: until it is ready."""
    port = free_port()
    command = [python, *(program or PROGRAM), "serve", model, "--port", str(port), "--log-json", *options]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=file)
        server = Served(process, port, log)
        try:
            if wait:
                _wait(server)
            yield server
        finally:
            _end(process)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait(server: Served) -> None:
    end = time.monotonic() + STARTS
    while time.monotonic() < end and server.process.poll() is None:
        try:
            urllib.request.urlopen(f"{server.root}/ready", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit(f"the server did not start: {server.log.read_text()[-500:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(ENDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
