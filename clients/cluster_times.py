"""What Ray costs: one stream's first token, and chunks a second of 16, beside a bare server, in turns.

python clients/cluster.py --times           on a quiet machine with 4 cores or more

First token: SmolLM2 with one thread, one stream at a time. Chunks: a toy target that answers at once, and
`stream_interval: 0`, so that every token is a chunk. Both servers run all the time and are asked in turns.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn

from checks import Tally, expect
from clustered import clustered
from served import ROOT, served
from wire import HOST, PATIENCE, get, leave, post, send

TURNS = 15
STREAMS = 16
CHUNK_TOKENS = 200  # of a stream of the toy, whose context is 256
MOST_ADDED = 0.015  # seconds to the first token
LEAST_RATIO = 0.8  # of the chunks a second of a bare server
COMMON: dict[str, Any] = {"max_sequences": STREAMS, "threads": 1}


async def first_token(port: int) -> float:
    """Seconds to the first chunk."""
    body = {"prompt": "The sea was calm that morning, and", "max_tokens": 8, "temperature": 0, "stream": True}
    reader, writer = await asyncio.open_connection(HOST, port)
    began = time.perf_counter()
    writer.write(post("/v1/completions", body))
    async with asyncio.timeout(PATIENCE):
        await reader.readuntil(b"data: ")
        seconds = time.perf_counter() - began
        await reader.readuntil(b"\r\n0\r\n\r\n")  # the end of the chunks: a proxy may keep the connection
    await leave(writer)
    return seconds


async def chunks_a_second(port: int) -> float:
    body = {"prompt": "a", "max_tokens": CHUNK_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    body["return_token_ids"] = True  # a token that is no whole character is a chunk, too
    began = time.perf_counter()
    answers = await asyncio.gather(*(send(port, post("/v1/completions", body)) for _ in range(STREAMS)))
    seconds = time.perf_counter() - began
    chunks = [len(answer.events()) for answer in answers]
    expect(min(chunks) >= CHUNK_TOKENS, f"every token is a chunk: {sorted(chunks)}")
    return sum(chunks) / seconds


async def in_turns(ports: tuple[int, int], measure: Callable[[int], Awaitable[float]]) -> list[list[float]]:
    """Measure both servers one after the other, after a round that does not count."""
    await ready(ports[1])
    found: list[list[float]] = [[], []]
    for turn in range(TURNS + 1):
        for i, port in enumerate(ports):
            value = await measure(port)
            found[i] += [value] if turn else []
    return found


async def ready(port: int) -> None:
    for _ in range(800):
        try:
            if (await send(port, get("/ready"))).status == 200:
                return
        except OSError:
            pass
        await asyncio.sleep(0.5)
    raise AssertionError("the cluster does not start")


def measured(
    python: str, model: str, measure: Callable[[int], Awaitable[float]], **options: Any
) -> tuple[float, float]:
    """The medians of the bare server and of the cluster."""
    given = {"model": model, "drafter": ["none"], **COMMON, **options}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "serve.yaml"
        file.write_text(json.dumps(given), encoding="utf-8")
        flags = ("--config", str(file)) if model == "smollm2" else ("--config", str(file), "--served-name", "toy")
        with served(python, *flags, model=model) as bare, clustered(python, given, cpus=1) as cluster:
            both = asyncio.run(in_turns((bare.port, cluster.port), measure))
    bare_median, ray_median = map(statistics.median, both)
    return bare_median, ray_median


def toy(folder: str) -> str:
    sys.path.insert(0, str(ROOT))
    from tests.cli.tiny_model import write_model

    return str(write_model(Path(folder)))


def main(python: str) -> NoReturn:
    tally = Tally("cluster-times")
    with tally("first token, one stream"):
        bare, ray = measured(python, "smollm2", first_token)
        print(f"  first token: bare {1000 * bare:.1f} ms, Ray {1000 * ray:.1f} ms, added {1000 * (ray - bare):.1f} ms")
        expect(ray - bare <= MOST_ADDED, f"more than {1000 * MOST_ADDED:.0f} ms are added")
    with tally(f"chunks a second, {STREAMS} streams"), tempfile.TemporaryDirectory() as folder:
        bare, ray = measured(python, toy(folder), chunks_a_second, stream_interval=0, format="fp32")
        print(f"  chunks a second: bare {bare:.0f}, Ray {ray:.0f}, ratio {ray / bare:.2f}")
        expect(ray >= LEAST_RATIO * bare, f"less than {LEAST_RATIO} of a bare server's")
    tally.end()
