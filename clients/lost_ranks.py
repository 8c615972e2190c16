"""Losses of a rank of a split model: it is killed or stopped under load, idle, or while the server starts.

Cases of kill.py. Each loss has a server of its own: `paceline serve` of a toy over two processes, in torch and compiled
by turns. Under load every request must end exactly once, within 10 s, with an error. In each case the process must end
by itself with status 1 and name the rank, and no other process of it may be left.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checks import Tally, expect
from prompts import CHAT, COMPLETIONS, SAMPLING
from served import ROOT, Served, served
from wire import Answer, get, post, send

DEADLINE = 10.0  # seconds from the loss to the end of every request, and of the process
STARTS = 120.0  # seconds for ranks to start
CLIENTS = 12
SPREAD = 1.0  # seconds of a load in which a rank is lost
FORMATS = ("fp32", "int4")  # ranks in torch, compiled ranks
WAYS = (signal.SIGKILL, signal.SIGSTOP)
SAID = {signal.SIGKILL: "rank 1 was killed by SIGKILL", signal.SIGSTOP: "rank 1 is stuck"}
WORKER = b"paceline.runner.parallel.worker"
ENDS = {(200, "engine_error"), (500, "engine_error"), (503, "engine_dead"), (0, "refused")}


@dataclass(slots=True)
class Loss:
    """One loss of a rank, and what came of it."""

    way: str
    format: str
    after: float  # seconds before it, under load, idle or of starting
    ends: Counter[str] = field(default_factory=Counter)
    answered: int = 0  # requests that had ended well before
    slowest: float = 0.0  # seconds from the loss to the end of the last request
    left: float = 0.0  # seconds from the loss to the end of the process
    said: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            "way": self.way,
            "format": self.format,
            "after_s": round(self.after, 3),
            "ends": dict(self.ends),
            "answered_before": self.answered,
            "slowest_request_s": round(self.slowest, 2),
            "process_ended_s": round(self.left, 2),
            "said": self.said,
        }


@contextmanager
def split_server(python: str, model: str, format: str) -> Iterator[Served]:
    options = ("--tensor-parallel", "2", "--threads", "1", "--format", format, "--served-name", "toy")
    with served(python, *options, model=model, wait=False) as server:
        yield server


def toy(folder: str) -> str:
    sys.path.insert(0, str(ROOT))
    from tests.cli.tiny_model import write_model

    return str(write_model(Path(folder)))


def workers(server: Served) -> list[int]:
    """The processes of other ranks."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == server.process.pid and WORKER in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it has ended
            continue
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def body(draw: random.Random, index: int) -> tuple[str, dict[str, Any]]:
    """A stream with a short or a long prompt, and a short or a long answer."""
    text = "".join(draw.choices("abcdefgh ", k=draw.choice((8, 30, 120))))
    fields = {"max_tokens": draw.choice((8, 60, 110)), "seed": index, "stream": True, "ignore_eos": True}
    fields |= SAMPLING[index % len(SAMPLING)]
    if index % 2:
        return CHAT, {"messages": [{"role": "user", "content": text}], **fields}
    return COMPLETIONS, {"prompt": text, **fields}


class Load:
    """Clients that ask one request after the other until one ends with an error."""

    def __init__(self, server: Served, draw: random.Random) -> None:
        self._server, self._draw = server, draw
        self._asked = 0
        self.good: list[float] = []  # when requests ended well
        self.bad: list[tuple[float, float, int, tuple[str, ...]]] = []  # when begun and ended, status, words of its end
        self.tasks = [asyncio.create_task(self._client()) for _ in range(CLIENTS)]

    async def _client(self) -> None:
        while True:
            self._asked += 1
            path, asked = body(self._draw, self._asked)
            request = post(path, asked, {"X-Request-Id": f"request-{self._asked}"})
            began = time.monotonic()
            try:
                answer = await send(self._server.port, request)
            except ConnectionRefusedError:
                self.bad.append((began, time.monotonic(), 0, ("refused",)))
                return
            ends = words_of(answer)
            if answer.status != 200 or ends != ("length",):
                self.bad.append((began, time.monotonic(), answer.status, ends))
                return
            self.good.append(time.monotonic())

    async def runs(self) -> None:
        """Wait until some requests have ended well."""
        while len(self.good) < CLIENTS // 2:
            expect(not self.bad, f"before the loss: {self.bad[:1]}")
            await asyncio.sleep(0.02)

    @property
    def names(self) -> set[str]:
        return {f"request-{number}" for number in range(1, self._asked + 1)}


def words_of(answer: Answer) -> tuple[str, ...]:
    """Every word that ends a request."""
    if answer.status != 200:
        return (answer.json()["error"]["code"],) if answer.body else ("no answer",)
    ends = []
    for event in answer.events():
        ends += [choice["finish_reason"] for choice in event.get("choices", ()) if choice["finish_reason"]]
        ends += [event["error"]["code"]] if "error" in event else []
    return (*ends, *(() if answer.whole else ("cut off",)))


async def ready(server: Served) -> None:
    until = time.monotonic() + STARTS
    while time.monotonic() < until:
        expect(server.process.poll() is None, f"it has ended: {server.log.read_text()[-500:]}")
        try:
            if (await send(server.port, get("/ready"))).status == 200:
                return
        except ConnectionRefusedError:
            pass
        await asyncio.sleep(0.1)
    raise AssertionError("it has not started")


async def ended(server: Served, others: list[int], lost: float) -> float:
    """Wait for the end of the process and of its ranks; the seconds since the loss."""
    while server.process.poll() is None or any(map(is_running, others)):
        left = [pid for pid in others if is_running(pid)]
        expect(time.monotonic() - lost < 2 * DEADLINE, f"still there: {server.process.poll()}, ranks {left}")
        await asyncio.sleep(0.02)
    return time.monotonic() - lost


def message(server: Served) -> str:
    """The last line that is not of the log."""
    lines = [line for line in server.log.read_text().splitlines() if line and not line.startswith("{")]
    return lines[-1] if lines else ""


async def check_end(server: Served, loss: Loss, way: signal.Signals, others: list[int], lost: float) -> None:
    """Wait for the end of the process; note it, and check that it is in time and names the rank."""
    loss.left, loss.said = await ended(server, others, lost), message(server)
    status = server.process.returncode
    expect(status == 1, f"status {status}: {loss.said}")
    expect(loss.said.startswith("paceline: error: ") and SAID[way] in loss.said, f"{SAID[way]!r}: {loss.said!r}")
    expect(loss.left <= DEADLINE, f"the process ended after {loss.left:.1f} s")


async def under_load(server: Served, loss: Loss, way: signal.Signals, draw: random.Random) -> None:
    await ready(server)
    others, load = workers(server), Load(server, draw)
    expect(len(others) == 1, f"ranks beside the first: {others}")
    await load.runs()
    await asyncio.sleep(loss.after)
    loss.answered, lost = len(load.good), time.monotonic()
    os.kill(others[0], way)
    async with asyncio.timeout(6 * DEADLINE):
        await asyncio.gather(*load.tasks)
    for began, end, status, ends in load.bad:
        expect(len(ends) == 1 and (status, ends[0]) in ENDS, f"status {status}, ends {ends}")
        expect(status != 0 or began > lost, "a request before the loss was refused")
        expect(end - max(began, lost) <= DEADLINE, f"a request ended {end - max(began, lost):.1f} s after the loss")
        loss.slowest = max(loss.slowest, end - max(began, lost))
        loss.ends[f"{status} {ends[0]}"] += 1
    expect(any(status in (200, 500) for _, _, status, _ in load.bad), "no request was running")
    await check_end(server, loss, way, others, lost)
    check_log(server, load.names, loss)


def check_log(server: Served, names: set[str], loss: Loss) -> None:
    """Each request that was heard has one line, with its end."""
    found = Counter(line["request_id"] for line in server.lines() if "request_id" in line)
    expect(set(found.values()) == {1}, f"more than one line: {found.most_common(3)}")
    expect(len(names) - len(found) <= loss.ends["0 refused"], f"not in the log: {sorted(names - found.keys())}")
    finishes = {line.get("finish", "none") for line in server.lines() if "request_id" in line}
    expect(finishes <= {"length", "error", "none"}, f"{finishes}")  # none: the engine was dead already


async def idle(server: Served, loss: Loss, way: signal.Signals, draw: random.Random) -> None:
    """The process ends without a request that would find out."""
    await ready(server)
    await without_load(server, loss, way)


async def while_it_starts(server: Served, loss: Loss, way: signal.Signals, draw: random.Random) -> None:
    """From the start of the process to the end of its loading."""
    until = time.monotonic() + STARTS
    while not workers(server) and time.monotonic() < until:
        await asyncio.sleep(0.01)
    await without_load(server, loss, way)


async def without_load(server: Served, loss: Loss, way: signal.Signals) -> None:
    [other] = workers(server)
    await asyncio.sleep(loss.after)
    lost = time.monotonic()
    os.kill(other, way)
    await check_end(server, loss, way, [other], lost)


async def first_rank(server: Served, loss: Loss, way: signal.Signals, draw: random.Random) -> None:
    """Rank 0, the server itself, is killed under load: nobody can answer, and the other rank ends by itself."""
    await ready(server)
    others, load = workers(server), Load(server, draw)
    await load.runs()
    await asyncio.sleep(loss.after)
    lost = time.monotonic()
    os.kill(server.process.pid, signal.SIGKILL)
    outcomes = await asyncio.gather(*load.tasks, return_exceptions=True)
    broken = [each for each in outcomes if isinstance(each, BaseException) and not isinstance(each, ConnectionError)]
    expect(not broken, broken)
    loss.left = await ended(server, others, lost)
    expect(loss.left <= DEADLINE, f"a rank was left for {loss.left:.1f} s")


Play = Callable[[Served, Loss, signal.Signals, random.Random], Awaitable[None]]


def lose(python: str, tally: Tally, name: str, *, count: int, seed: int) -> list[Loss]:
    """Lose a rank so many times, each in a server of its own."""
    play, ways, spread = CASES[name]
    draw, losses = random.Random(f"{name} {seed}"), list[Loss]()
    with tempfile.TemporaryDirectory() as folder:
        model = toy(folder)
        for number in range(count):
            way, format = ways[number % len(ways)], FORMATS[number // len(ways) % len(FORMATS)]
            loss = Loss(way.name, format, draw.uniform(0, spread))
            what = f"{name} {number + 1} of {count}: {way.name} after {loss.after:.2f} s, {format}"
            with tally(what), split_server(python, model, format) as server:
                asyncio.run(play(server, loss, way, random.Random(f"{seed} {number}")))
                losses.append(loss)
    return losses


def summary(losses: list[Loss]) -> str:
    lines = []
    for way in sorted({loss.way for loss in losses}):
        mine = [loss for loss in losses if loss.way == way]
        ends = sum((loss.ends for loss in mine), Counter[str]())
        slowest = [loss.slowest for loss in mine]
        left = [loss.left for loss in mine]
        lines.append(
            f"        {way}: {len(mine)} times; requests {dict(ends)}; the last one ended after "
            f"{statistics.median(slowest):.2f} s (median), {max(slowest):.2f} s at most; the process after "
            f"{statistics.median(left):.2f} s, {max(left):.2f} s"
        )
    return "\n".join(lines)


FEW = 4  # losses of a case whose number is not asked for
# What happens, in which ways, and over how many seconds its times are spread.
CASES: dict[str, tuple[Play, tuple[signal.Signals, ...], float]] = {
    "rank": (under_load, WAYS, SPREAD),
    "rank-idle": (idle, WAYS, 6.0),
    "rank-start": (while_it_starts, WAYS[:1], 3.0),
    "rank-0": (first_rank, WAYS[:1], SPREAD),
}


def rank_losses(
    python: str, tally: Tally, names: Sequence[str], *, kills: int, seed: int = 0, save: Path | None = None
) -> None:
    """Play these cases, each so many times."""
    cases = {name: lose(python, tally, name, count=kills, seed=seed) for name in names}
    for name, losses in cases.items():
        print(f"        {name}:\n{summary(losses)}", flush=True)
    if save:
        everything = {name: [loss.as_json() for loss in losses] for name, losses in cases.items()}
        save.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
